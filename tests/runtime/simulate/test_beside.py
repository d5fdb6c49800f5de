"""Assists beside the main batch: what they cost it, how long the CPU waits for them, and that
nothing changes where there are none."""

from typing import Any

import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.routing import Route
from dualpace.runtime.simulate.config import ProfileConfig
from dualpace.runtime.simulate.cost import CostModel
from dualpace.runtime.simulate.devices import Cpu, Gpu
from dualpace.runtime.simulate.run import simulate
from dualpace.runtime.simulate.times import step_times
from dualpace.settings.compose import load
from dualpace.settings.schema import SimulateConfig

WAIT_S, STRETCH, LOSS = 0.0006, 1.5, 0.25
MACHINE = [
    "workload=lognormal",
    "workload.num_requests=32",
    "workload.rate=inf",
    "workload.max_len=4096",
    "kv.gpu_blocks=300",
    "kv.host_blocks=4000",
    f"simulated.assist.beside_wait_ms={1e3 * WAIT_S}",
    f"simulated.assist.beside_stretch={STRETCH}",
]


def config(*overrides: str, loss: float | None = LOSS) -> SimulateConfig:
    value = "null" if loss is None else loss
    made = load(*MACHINE, f"simulated.assist.beside_loss={value}", *overrides, root="simulate")
    assert isinstance(made, SimulateConfig)
    return made


@pytest.fixture(scope="module")
def profile() -> ProfileConfig:
    return config().simulated


def test_an_assist_lengthens_the_batch_beside_it_by_a_share_of_its_time(
    profile: ProfileConfig,
) -> None:
    gpu = Gpu(CostModel(profile))
    main = gpu.start(0.0, 0.0, 0.010, 0.0)
    end_s = main.end_s
    seen_s = gpu.assist(0.0137, 0.002)  # in the middle of a layer: no boundary is waited for
    assert seen_s == pytest.approx(0.0137 + WAIT_S + STRETCH * 0.002)
    assert main.end_s == gpu.free_s == pytest.approx(end_s + LOSS * STRETCH * 0.002)
    assert gpu.assist_s == pytest.approx(main.end_s - end_s)


def test_an_idle_gpu_takes_no_longer_for_an_assist_than_alone(profile: ProfileConfig) -> None:
    gpu = Gpu(CostModel(profile))
    host_s = (profile.assist.launch_ms + profile.assist.finalize_ms) / 1e3
    assert gpu.assist(5.0, 0.002) == pytest.approx(5.002 + host_s)
    late = gpu.start(5.0, 0.0, 0.01, 0.0).start_s - 5.0
    assert late == pytest.approx(LOSS * STRETCH * 0.002)


def test_an_iteration_waits_for_each_of_its_assists(profile: ProfileConfig) -> None:
    cost = CostModel(profile)
    gpu = Gpu(cost)
    gpu.start(0.0, 0.0, 1.0, 0.0)  # a batch that outlasts the iteration
    cpu = Cpu(cost, gpu)
    run = cpu.start(0.0, 8, 8000, Route.FUSED_ASSIST)
    while not cpu.advance():
        end_s = run.next_s
    device_s = 31 * cost.assist_post_attention(8) + cost.assist_final(8)
    expected = 32 * (run.local_s + WAIT_S) + STRETCH * device_s
    assert end_s == pytest.approx(expected)
    curves = step_times(cost, (0, 0))
    assert curves.cpu_decode_s(8, 8000, gpu_round_s=1.0) == pytest.approx(expected, rel=0.05)
    assert (
        curves.assist(8) == pytest.approx(gpu.assist_s) == pytest.approx(LOSS * STRETCH * device_s)
    )


def numbers(made: SimulateConfig) -> dict[str, Any]:
    return {k: v for k, v in simulate(made).items() if k not in ("simulator_s", "assist_mode")}


def test_without_assists_it_makes_no_difference_where_they_would_run() -> None:
    never = ["assist.post_attention_limit=256", "assist.post_layer_limit=255"]
    host = ["policy.host_admission=always", "cpu.max_batch_size=255", *never]
    for same in (["policy=gpu_only"], ["policy=dualpace", *host]):
        assert numbers(config(*same)) == numbers(config(*same, loss=None))


def test_the_less_the_main_batch_loses_the_more_the_host_tier_brings() -> None:
    def rate(*overrides: str, loss: float | None = LOSS) -> float:
        fused = ["assist.post_attention_limit=0", "assist.post_layer_limit=0"]
        made = config(*fused, "policy.host_admission=always", *overrides, loss=loss)
        return float(simulate(made)["request_throughput"])

    assert rate(loss=0.1) > rate(loss=0.9) > rate(loss=None)
    assert rate("assist.mode=boundary") == rate(loss=None)


def test_a_request_that_the_cpu_yields_last_of_all_is_swapped_in() -> None:
    """When everybody else is gone no event follows the CPU's look, and HBM is free."""
    fused = ["assist.post_attention_limit=0", "assist.post_layer_limit=0"]
    host = ["policy.host_admission=always", "workload.num_requests=24"]
    assert simulate(config(*fused, *host, loss=0.9))["completed"] == 24


def test_a_profile_without_that_number_is_simulated_between_stages() -> None:
    assert simulate(config())["assist_mode"] == "stream"
    assert simulate(config(loss=None))["assist_mode"] == "boundary"
    assert simulate(config("assist.mode=boundary"))["assist_mode"] == "boundary"


@pytest.mark.parametrize("window", ["[8]", "[25,8]", "[-1,5]"])
def test_a_window_that_is_none_is_one_sentence(window: str) -> None:
    with pytest.raises(ConfigError, match=r"window=\[.*\] is no time from and to"):
        config(f"window={window}")


def test_rates_of_a_window_are_those_of_its_tokens() -> None:
    made = config("window=[0,1e6]")
    result = simulate(made)
    assert result["window_requests_per_s"] == pytest.approx(32 / 1e6)
    tokens = result["total_output_tokens"]
    assert result["window_output_tokens_per_s"] == pytest.approx(tokens / 1e6)
    assert result["window_host_share"] == result["cpu_resident_tokens"] / tokens > 0
    half = simulate(config(f"window=[0,{result['duration'] / 2}]"))
    assert 0 < half["window_output_tokens_per_s"] * half["duration"] / 2 < tokens
