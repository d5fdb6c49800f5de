"""From settings to result, through Hydra: what the script prints, writes and refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dualpace.errors import ConfigError
from dualpace.runtime.bench.plot import draw
from dualpace.runtime.bench.results import load_results
from dualpace.runtime.schedule.check import check_log
from dualpace.runtime.simulate.report import print_report
from dualpace.runtime.simulate.run import simulate
from dualpace.settings.check import check
from dualpace.settings.compose import conf_dir, load, register
from dualpace.settings.schema import SimulateConfig
from tests.servers import PATIENCE_S

ROOT = Path(__file__).parents[3]
POLICIES = ("dualpace", "neo", "gpu_only")
# Long prompts press this small pool, so that every policy has to choose.
SMALL = [
    "workload=lognormal",
    "workload.num_requests=40",
    "workload.rate=6",
    "workload.max_len=4096",
    "kv.gpu_blocks=500",
    "kv.host_blocks=4000",
]


def settings(*overrides: str) -> SimulateConfig:
    register()
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        config = OmegaConf.to_object(compose("simulate", [*SMALL, *overrides]))
    assert isinstance(config, SimulateConfig)
    check(config)
    return config


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("declared", [True, False])
def test_the_logs_of_a_run_pass_the_replay(policy: str, declared: bool, tmp_path: Path) -> None:
    config = settings(f"policy={policy}")
    config.kv.output_estimate = "declared" if declared else "quantile"
    config.workload.max_tokens = "trace" if declared else "unset"
    config.runtime.round_log = str(tmp_path / "rounds.jsonl")
    config.runtime.request_log = str(tmp_path / "requests.json")
    result = simulate(config)
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").open()]
    requests = json.loads((tmp_path / "requests.json").read_text())
    problems = check_log(rounds, requests, declared and policy == "dualpace")
    if (
        policy == "neo"
    ):  # NEO keeps no reserve; the log says where Equation 2 would have held it back
        problems = [problem for problem in problems if "Equation 2" not in problem]
    assert problems == []
    assert len(requests) == result["completed"] == 40
    assert sum(r["output_len"] for r in requests) == result["total_output_tokens"]
    assert result["timeline"]["tokens"][-1] == result["total_output_tokens"]
    assert len(rounds) == result["gpu_rounds"] + result["cpu_rounds"]


def test_only_policies_with_a_host_tier_decode_on_the_host() -> None:
    shares = {p: simulate(settings(f"policy={p}"))["cpu_resident_tokens"] for p in POLICIES}
    assert shares["dualpace"] > 0 and shares["neo"] > 0 and shares["gpu_only"] == 0


def test_the_same_seed_gives_the_same_result_and_another_one_does_not() -> None:
    def numbers(*overrides: str) -> dict[str, Any]:
        return {k: v for k, v in simulate(settings(*overrides)).items() if k != "simulator_s"}

    assert numbers() == numbers()
    assert numbers() != numbers("workload.seed=1")


def test_a_faster_host_kernel_lets_neo_decode_more_on_the_host() -> None:
    slow = simulate(settings("policy=neo", "workload.rate=inf"))
    fast = simulate(
        settings(
            "policy=neo", "workload.rate=inf", "policy.fp16_kernel=false", "policy.launch_ms=0"
        )
    )
    assert fast["cpu_resident_tokens"] > slow["cpu_resident_tokens"]


def latency(*overrides: str) -> float:
    """Mean s/token of short answers on a machine whose GPU pays dearly for assists."""
    machine = ("simulated=h20x2_qwen3_14b", "kv.gpu_blocks=1000")
    stream = ("workload=fixed", "workload.num_requests=60", "workload.rate=7")
    lengths = ("workload.prompt_len=1600", "workload.output_len=60")
    result = simulate(load(*machine, *stream, *lengths, *overrides, root="simulate"))
    return float(result["mean_normalized_latency_s_per_token"])


def test_a_host_tier_that_costs_more_than_it_brings_switches_itself_off() -> None:
    gpu_only = latency("policy=gpu_only")
    assert latency("policy=dualpace") <= 1.01 * gpu_only
    assert latency("policy=dualpace", "policy.host_admission=always") > 1.5 * gpu_only
    assert latency("policy=paper") > 1.5 * gpu_only


def test_a_host_tier_that_brings_more_is_used() -> None:
    pressed = ("workload.num_requests=80", "workload.rate=inf")
    dualpace, gpu_only = (simulate(settings(f"policy={p}", *pressed)) for p in POLICIES[::2])
    assert dualpace["cpu_resident_tokens"] > 0
    assert dualpace["request_throughput"] > 1.05 * gpu_only["request_throughput"]


def test_few_host_rows_do_not_cost_the_gpu_an_iterations_assists() -> None:
    """Forty residents make seven tokens in the time of the assists that one host row would have."""
    few = ("simulated=h200_llama_31_8b", "kv.gpu_blocks=2560", "cpu.max_batch_size=2")
    stream = ("workload.num_requests=150", "workload.rate=16", "assist.post_attention_limit=0")
    ours, always = (
        simulate(settings(*few, *stream, "assist.post_layer_limit=0", f"policy.host_admission={a}"))
        for a in ("profile", "always")
    )
    assert ours["cpu_resident_tokens"] > 0
    assert ours["gpu_assist"] < 0.1 * always["gpu_assist"]


def test_cpu_tensor_parallelism_and_host_memory_can_be_set() -> None:
    one = simulate(settings("workload.rate=inf"))
    two = simulate(settings("workload.rate=inf", "cpu.tp=2"))
    assert two["duration"] < one["duration"]
    config = settings("kv.host_blocks=null", "kv.host_gib=1")
    assert simulate(config)["host_blocks"] == 512


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("gpu.memory_gb_s", "0", "=0 is nothing to compute with: set it above 0."),
        ("cpu.attention_efficiency", "0", "=0 is nothing to compute with: set it above 0."),
        ("shape.num_layers", "0", "=0 is nothing to compute with: set it above 0."),
        ("link.gb_s", "-5", "=-5 is no number from 0 on"),
        ("assist.launch_ms", "nan", "=nan is no number from 0 on"),
        ("limits.host_blocks", "-5", "=-5 is no number from 0 on"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(key: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^simulated\.{re.escape(key + sentence)}"):
        settings(f"simulated.{key}={value}")


@pytest.mark.parametrize(
    "override",
    [
        *("gpu.tp=2", "gpu.threads=2", "gpu.device=cuda", "cpu.threads=2", "hw.cores=4"),
        *("model.max_context=100", "compile.start=ahead", "kv.check_moves=true"),
    ],
)
def test_a_machine_is_refused_that_would_be_ignored(override: str) -> None:
    key = re.escape(override.partition("=")[0])
    with pytest.raises(ConfigError, match=rf"^{key}=\w+ has no effect .* with simulated=NAME\.$"):
        settings(override)


def test_a_pool_that_no_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^kv\.host_blocks=\d+ is more than the 10000000 blocks"):
        simulate(load("kv.host_gib=1e9", root="simulate"))


def test_requests_of_which_none_fits_are_no_result() -> None:
    long = ("workload=fixed", "workload.prompt_len=10000000", "workload.num_requests=3")
    with pytest.raises(ConfigError, match=r"^None of 3 requests can be served: prompt of 10000000"):
        simulate(load(*long, root="simulate"))


def test_results_of_a_sweep_are_drawn(tmp_path: Path) -> None:
    """The scripts that sweep and draw are run as the README shows them (test_docs)."""
    found = [
        simulate(
            settings(f"policy={policy}", f"workload.rate={rate}", "workload.label=conversation")
        )
        for policy in POLICIES[::2]
        for rate in (2, 6)
    ]
    (tmp_path / "all.json").write_text(json.dumps(found))
    files = draw(load_results([str(tmp_path)]), [1, 10, 14], tmp_path)
    assert {file.name for file in files} == {
        f"figure{number}.{kind}" for number in (1, 10, 14) for kind in ("png", "svg")
    }
    assert all(file.stat().st_size > 1000 for file in files)


def test_impossible_settings_are_one_sentence_and_exit_code_1() -> None:
    script = ROOT / "scripts" / "simulate.py"
    out = subprocess.run(
        [sys.executable, script, "workload=azure", "workload.path=nowhere.csv"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert out.returncode == 1
    assert "workload.path=nowhere.csv is not a file" in out.stderr
    assert "Traceback" not in out.stderr


@pytest.mark.parametrize("key", ["result", "runtime.round_log", "runtime.request_log"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=/dev/null/x.json cannot be written"):
        simulate(settings(f"{key}=/dev/null/x.json", "workload.num_requests=1"))


def test_the_report_of_a_traces_own_arrivals_names_no_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    rows = (f"2023-11-16 18:15:0{second},100,5" for second in range(4))
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    words = ["workload=azure", f"workload.path={trace}", "workload.arrival=trace"]
    print_report(simulate(load(*words, "workload.num_requests=4", root="simulate")))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "4 of 4 requests, azure, as in the trace, 100/5 tokens" in first
    assert json.loads(last)["arrival"] == "trace"
