"""The simulator with the real scheduler: conservation, determinism, times worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dualpace.runtime.bench.workload import RequestSpec
from dualpace.runtime.routing import Route, route
from dualpace.runtime.schedule.estimate import Declared, Quantile
from dualpace.runtime.schedule.limits import Limits
from dualpace.runtime.schedule.policies import make_policy
from dualpace.runtime.schedule.state import State
from dualpace.runtime.simulate.config import ProfileConfig
from dualpace.runtime.simulate.cost import CostModel
from dualpace.runtime.simulate.devices import Cpu, Gpu, Link
from dualpace.runtime.simulate.simulator import Pauses, Simulation
from dualpace.runtime.simulate.work import GpuWorkModel

CONF = Path(__file__).parents[3] / "conf/simulated"


@pytest.fixture(scope="module")
def cost() -> CostModel:
    values = OmegaConf.load(CONF / "rtx4090_llama31_8b.yaml")
    del values["defaults"]
    profile = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ProfileConfig), values))
    assert isinstance(profile, ProfileConfig)
    return CostModel(profile)


def mixed(count: int, gap_s: float = 0.05) -> list[RequestSpec]:
    """Prompts of 50 to 900 tokens, outputs of 1 to 120, in a fixed irregular order."""
    return [
        RequestSpec(i, i * gap_s, 50 + (i * 379) % 851, 1 + (i * 53) % 120, 1 + (i * 53) % 120)
        for i in range(count)
    ]


def play(
    cost: CostModel,
    requests: list[RequestSpec],
    policy: str = "dualpace",
    *,
    gpu_blocks: int = 200,
    host_blocks: int = 4000,
    look_ahead: bool = True,
    quantile: bool = False,
    limits: tuple[int, int] = (0, 0),
) -> tuple[Simulation, State]:
    state = State(
        Limits(gpu_rows=64, cpu_rows=64),
        gpu_blocks,
        host_blocks,
        make_policy(policy),
        Quantile() if quantile else Declared(),
        look_ahead,
    )
    work = GpuWorkModel(cost, cost.cpu_attention_fp16, 0.0)
    run = Simulation(state, cost, work, requests, route=lambda rows: route(rows, *limits))
    run.run()
    return run, state


@pytest.mark.parametrize("policy", ["dualpace", "gpu_only"])
@pytest.mark.parametrize("quantile", [False, True])
@pytest.mark.parametrize("look_ahead", [False, True])
def test_every_request_ends_with_its_tokens_in_order(
    cost: CostModel, policy: str, quantile: bool, look_ahead: bool
) -> None:
    requests = mixed(100)
    run, state = play(cost, requests, policy, quantile=quantile, look_ahead=look_ahead)
    for spec in requests:
        times = run.records[spec.id].token_times_s
        assert len(times) == spec.output_len
        assert times == sorted(times) and times[0] > spec.arrival_s
    assert sum(run.timeline.tokens) == sum(spec.output_len for spec in requests)
    assert sum(run.timeline.cpu_tokens) == sum(r.cpu_tokens for r in run.records.values())
    state.check()


def test_answers_end_before_an_unset_max_tokens_and_pools_are_empty_afterwards(
    cost: CostModel,
) -> None:
    requests = [replace(spec, max_tokens=None) for spec in mixed(120)]
    run, state = play(cost, requests, quantile=True)
    assert [len(run.records[s.id].token_times_s) for s in requests] == [
        s.output_len for s in requests
    ]
    assert not state.requests


def test_the_same_workload_gives_the_same_times(cost: CostModel) -> None:
    first, _ = play(cost, mixed(100))
    second, _ = play(cost, mixed(100))
    assert [r.token_times_s for r in first.records.values()] == [
        r.token_times_s for r in second.records.values()
    ]


def test_the_host_tier_is_used_under_pressure_and_only_then(cost: CostModel) -> None:
    pressed, _ = play(cost, mixed(80, gap_s=0.0))
    roomy, _ = play(cost, mixed(80, gap_s=0.0), gpu_blocks=20000)
    assert sum(pressed.timeline.cpu_tokens) > 0
    assert sum(roomy.timeline.cpu_tokens) == 0


def test_a_lone_request_takes_the_time_of_its_stages(cost: CostModel) -> None:
    spec = RequestSpec(0, 1.0, 512, 3, 3)
    run, _ = play(cost, [spec], look_ahead=False)
    layers, host = cost.num_layers, cost.profile.host.gpu_round_ms / 1e3

    def dense(rows: int) -> float:
        return cost.gpu_pre_attention(rows) + cost.gpu_post_attention(rows)

    prefill = layers * (dense(512) + cost.gpu_prefill_attention(512, 512)) + cost.gpu_post_layer(1)
    decodes = [
        layers * (dense(1) + cost.gpu_decode_attention(length)) + cost.gpu_post_layer(1)
        for length in (513, 514)
    ]
    first = 1.0 + host + prefill
    second = first + host + decodes[0]
    expected = [first, second, second + host + decodes[1]]
    assert run.records[0].token_times_s == pytest.approx(expected)
    ahead, _ = play(cost, [spec], look_ahead=True)
    assert ahead.records[0].token_times_s[-1] == pytest.approx(expected[-1] - 2 * host)


def test_a_request_that_no_pool_can_hold_is_refused_and_the_rest_is_served(
    cost: CostModel,
) -> None:
    requests = [RequestSpec(0, 0.0, 90_000, 10, 10), RequestSpec(1, 0.0, 100, 10, 10)]
    run, _ = play(cost, requests)
    assert "the limit is" in run.records[0].error and not run.records[0].token_times_s
    assert run.records[1].completed


def test_an_assist_waits_for_the_boundary_and_displaces_the_main_batch(cost: CostModel) -> None:
    gpu = Gpu(cost)
    main = gpu.start(0.0, 0.0, 0.010, 0.0)
    end = main.end_s
    service = (cost.profile.assist.launch_ms + cost.profile.assist.finalize_ms) / 1e3 + 0.001
    assert gpu.assist(0.013, 0.001) == pytest.approx(0.020 + service)
    assert main.end_s == pytest.approx(end + service)


def test_an_idle_gpu_serves_an_assist_at_once_and_the_next_batch_waits_for_it(
    cost: CostModel,
) -> None:
    gpu = Gpu(cost)
    done = gpu.assist(5.0, 0.002)
    assert done > 5.002
    assert gpu.start(5.001, 0.0, 0.01, 0.0).start_s == pytest.approx(done)


@pytest.mark.parametrize(
    ("taken", "assists"), [(Route.FULL_CPU, 0), (Route.SPLIT_FINAL, 1), (Route.FUSED_ASSIST, 32)]
)
def test_a_route_asks_for_as_many_assists_as_it_names(
    cost: CostModel, taken: Route, assists: int
) -> None:
    cpu = Cpu(cost, Gpu(cost))
    cpu.start(0.0, 8, 8000, taken)
    served = 0
    while not cpu.advance():
        served += 1
    assert served == assists and cpu.iteration is None


def test_copies_of_one_direction_queue_up_and_the_other_is_free(cost: CostModel) -> None:
    link = Link(cost)
    once = link.to_host(0.0, 100)
    assert link.to_host(0.0, 100) == pytest.approx(2 * once)
    assert link.to_gpu(0.0, 100) == pytest.approx(once)
    last_layer = cost.copy(10 * cost.kv_block_bytes / cost.num_layers)
    assert link.stream_to_host(10.0, 12.0, 10) == pytest.approx(12.0 + last_layer)


def test_a_pause_counts_only_while_somebody_is_on_the_host() -> None:
    pauses = Pauses()
    for now, advanced, resident in (
        (5.0, False, False),  # nobody yet
        (6.0, False, True),  # the first arrives
        (8.5, True, True),  # and advances 2.5 s later
        (9.0, True, False),  # and leaves
        (20.0, False, True),
        (20.5, True, True),
    ):
        pauses.note(now, advanced, resident)
    assert pauses.longest_s == pytest.approx(2.5)
    assert pauses.long == [(6.0, 8.5)]
