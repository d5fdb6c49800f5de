"""Wherever a request lives and however its stages are routed, its tokens are the reference's, and
so are their log-probabilities."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dualpace import LLM, SamplingParams
from dualpace.runtime.schedule.check import check_log
from tests.e2e.conftest import Record, Rounds, Serve
from tests.e2e.live import Stats, ask, is_idle, stopped, wait_until
from tests.e2e.logprobs import check_output, check_routes
from tests.e2e.prompts import PROMPTS
from tests.servers import PATIENCE_S

if TYPE_CHECKING:
    from tests.e2e.judges import Judge

NUM_TOKENS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
LAYERS = 3  # of a model cut short, where what a token means does not matter


def rows_by_route(log: list[Record]) -> Counter[str]:
    rows: Counter[str] = Counter()
    for record in log:
        rows[record["route"]] += len(record["batch"])
    return rows


@pytest.fixture(scope="module")
def short_model(hf_smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of SmolLM2, between its table and its head."""
    folder = tmp_path_factory.mktemp("short")
    for file in hf_smollm2_folder.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((hf_smollm2_folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    return folder


@pytest.fixture(scope="module")
def short_judge(short_model: Path) -> Judge:
    from transformers import AutoModelForCausalLM

    from tests.e2e.judges import Judge

    return Judge(AutoModelForCausalLM.from_pretrained(short_model, dtype="float32").eval())


def check(
    llm: LLM,
    judge: Judge,
    prompts: list[str],
    host_stands_until: Callable[[Stats], bool] = lambda stats: True,
) -> None:
    """Generates and compares; every block has come back after."""
    asked = [(None, 0, 5)[place % 3] for place in range(len(prompts))]
    params = [replace(PARAMS, logprobs=best) for best in asked]
    with stopped(llm, "cpu"):
        answers = ask(llm, prompts, params)
        wait_until(llm, host_stands_until)
    eos = llm.plan.model.eos_token_ids
    undecided = 0
    for text, output, best in zip(prompts, answers.result(PATIENCE_S), asked, strict=True):
        judgement = judge(output.prompt_token_ids, output.token_ids)
        check_output(output, best, judgement.logprobs)
        assert judgement.wrong is None, f"{text!r} -> {output.text!r}, {judgement}"
        undecided += judgement.decided < len(output.token_ids)
        assert (output.token_ids[-1] in eos) == (output.finish_reason == "stop")
        assert len(output.token_ids) == NUM_TOKENS or output.finish_reason == "stop"
    assert undecided == 0, "ties: the comparison means less than it should"
    wait_until(llm, is_idle)


def test_the_whole_model_in_chunks_and_swapped_out_and_in_while_generating(
    serve: Serve, rounds: Rounds, judge: Judge, hf_smollm2_folder: Path
) -> None:
    """What the host has it keeps while it stands; so HBM overflows, and then is empty."""

    def both_ways(stats: Stats) -> bool:
        return bool(stats["events"].get("swap_out") and stats["events"].get("swap_in"))

    settings = {
        "kv.gpu_blocks": 14,
        "gpu.token_limit": 16,
        "cpu.max_batch_size": 2,
        "policy.host_admission": "always",
    }
    with serve(str(hf_smollm2_folder), **settings) as llm:
        # The longest come last, so that who moves has several blocks.
        check(llm, judge, sorted(PROMPTS[::2], key=len), both_ways)
    log = rounds()
    assert check_log(log) == []
    prefills = Counter(request for record in log for request in record["prefill_gpu"])
    anew = {request for record in log for request in record["preempted"]}
    assert any(times > 1 for request, times in prefills.items() if request not in anew)


def test_host_resident_by_every_route(
    serve: Serve, rounds: Rounds, short_judge: Judge, short_model: Path
) -> None:
    settings = {
        "kv.gpu_blocks": 1,
        "kv.output_estimate": "declared",
        "assist.post_layer_limit": 3,
        "assist.post_attention_limit": 6,
    }

    def all_on_the_host(stats: Stats) -> bool:
        return stats["cpu_running"] + stats["cpu_waiting"] == len(prompts)

    with serve(str(short_model), **settings) as llm:
        long = sorted(PROMPTS, key=len, reverse=True)
        for prompts in (long[:3], long[3:9], long[9:]):
            check(llm, short_judge, prompts, all_on_the_host)
        check_routes(llm, short_judge)
    log = rounds()
    assert check_log(log) == []
    rows = rows_by_route([r for r in log if r["engine"] == "cpu"])
    assert rows.keys() == {"FULL_CPU", "SPLIT_FINAL", "FUSED_ASSIST"}
    assert min(rows.values()) >= 3 * (NUM_TOKENS - 1), rows
