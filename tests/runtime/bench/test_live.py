"""The benchmark with the real server: started by the run, a tiny random model, both tiers."""

import json
from pathlib import Path

import pytest

from dualpace.runtime.bench.run import bench
from dualpace.runtime.schedule.check import check_log
from dualpace.settings.compose import load
from dualpace.settings.schema import BenchConfig
from tests.e2e.live import slow_workers
from tests.servers import PATIENCE_S

HBM_BLOCKS = 8


def test_a_started_server_is_measured_with_both_tiers_at_work(tmp_path: Path) -> None:
    rounds = tmp_path / "rounds.jsonl"
    config = load(
        "+hw=cpu",
        "+experiment=fig9_conv_small",
        "workload.num_requests=40",
        f"kv.gpu_blocks={HBM_BLOCKS}",
        "bench.rates=[200,400]",
        f"bench.out={tmp_path}",
        f"runtime.round_log={rounds}",
        *(f"{key}={value}" for key, value in slow_workers().items()),
        root="bench",
    )
    assert isinstance(config, BenchConfig)
    results = bench(config)
    for result in results:
        assert (result["completed"], result["failed"], result["wrong_lengths"]) == (40, 0, 0)
        assert result["cpu_resident_tokens"] > 0 and result["gpu_resident_tokens"] > 0
        assert result["compiles_after_ready"] == 0 and result["cpu_rounds"] > 0
        assert max(result["input_lens"]) > HBM_BLOCKS * 16, "the host's, whatever the pace"
        assert (result["gpu_blocks"], result["host_blocks"]) == (HBM_BLOCKS, 512)
        timeline, total = result["timeline"], result["total_output_tokens"]
        assert timeline["tokens"][-1] == total
        # The log counts where a request's KV lay, the stream which engine made the token.
        assert timeline["cpu_tokens"][-1] == result["cpu_resident_tokens"]
        assert timeline["t"][-1] == pytest.approx(result["duration"], abs=PATIENCE_S)  # one clock
    assert check_log([json.loads(line) for line in rounds.read_text().splitlines()]) == []
    assert {path.name for path in tmp_path.glob("*.json")} == {
        "dualpace-conversation-200.json",
        "dualpace-conversation-400.json",
    }
