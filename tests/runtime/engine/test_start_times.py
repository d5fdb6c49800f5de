"""Without a profile the host tier is judged by what the workers timed when they started."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from dualpace.runtime.engine.predict import MeasuredPredictor
from dualpace.runtime.engine.scheduler import make_learner
from dualpace.runtime.engine.start_times import (
    BESIDE_LOSS,
    BESIDE_S,
    BETWEEN_S,
    BUFFER_S,
    StartTimes,
    rising,
)
from dualpace.runtime.plan import AssistPlan, Plan, ProfilePlan
from dualpace.runtime.routing import ROUTES, Route
from dualpace.runtime.step_times import StepTimes
from dualpace.settings.resolve import resolve
from tests.runtime.engine.fake_workers import Engine, LayerTimes, play
from tests.runtime.schedule.predictor import flat_times
from tests.tiny_settings import settings

# Of one layer, in seconds.
GPU: dict[str, Any] = {
    "linear": [[1, 1.0], [3, 3.0], [513, 3.0]],
    "post_layer": [[1, 0.5], [2, 0.5]],
    "decode": [[0, 0.0], [256, 2.0]],
    "prefill": [[0, 0.0], [100, 1.0]],  # tokens times context
}
CPU: dict[str, Any] = {
    "host_pre": [[1, 1.0], [2, 2.0]],
    "host_post": [[1, 10.0], [2, 20.0]],
    "host_post_layer": [[1, 7.0], [2, 7.0]],
    "host": [[256, 4.0], [512, 8.0]],
}


def plan(*overrides: str) -> Plan:
    return resolve(settings("gpu.device=cpu", "kv.host_blocks=64", *overrides))


def learned(made: Plan) -> StepTimes:
    learner = StartTimes(made)
    learner.learn(CPU)
    assert learner.admission.times is None, "half of it is not known yet"
    learner.learn(GPU)
    assert learner.admission.times is not None
    return learner.admission.times


def test_steps_are_put_together_from_layers() -> None:
    made = plan()
    layers, times = made.model.num_layers, learned(made)
    assert times.gpu_decode_s(2, 256) == pytest.approx(layers * (2.0 + 2.0) + 0.5)
    assert times.cpu_decode_s(2, 512, 99.0) == pytest.approx(layers * (2.0 + 20.0 + 8.0) + 7.0)
    assert times.prefill(16) == pytest.approx(layers * (3.0 + 256 / 100) + 0.5)
    assert times.assist(2) == 0.0, "nobody asks for one"


@pytest.mark.parametrize(
    ("device", "mode", "lost_s", "share", "waits"),
    [
        ("cuda", "stream", 0.0, BESIDE_LOSS, 0.0),
        ("cuda", "boundary", BETWEEN_S, 1.0, 1.5),
        ("cpu", "stream", BETWEEN_S, 1.0, 0.5),
    ],
)
def test_assists_take_what_the_gpus_own_stages_of_as_many_rows_do(
    device: str, mode: str, lost_s: float, share: float, waits: float
) -> None:
    made = plan()
    gpu, assist = (
        replace(made.gpu, device=device),
        AssistPlan(post_attention_limit=2, post_layer_limit=1, mode=mode),
    )
    made = replace(made, gpu=gpu, assist=assist)
    layers, times = made.model.num_layers, learned(made)
    fixed_s = BESIDE_S if share < 1 else BETWEEN_S
    assert times.assist(1) == 0.0
    assert times.assist(2) == pytest.approx(lost_s + share * 0.5), "the post-layer alone"
    assert times.assist(3) == pytest.approx(layers * (lost_s + share * 3.0) + share * 0.5)
    split_s = layers * (2.0 + 20.0) + fixed_s + 0.5 + BUFFER_S
    fused_s = layers * (3.0 + fixed_s + 3.0 + BUFFER_S) + 0.5
    for rows, own_s, boundaries in ((2, split_s, 1), (3, fused_s, layers)):
        wait_s = boundaries * waits / layers * 10.0
        assert times.cpu_decode_s(rows, 0, 10.0) == pytest.approx(own_s + wait_s)


def test_what_took_less_for_more_is_no_reason_to_hope_for_still_less() -> None:
    curve = rising([[4, 2.0], [1, 3.0], [8, 5.0]])
    assert [curve(x) for x in (1, 4, 6, 8)] == [3.0, 3.0, 4.0, 5.0]
    assert rising([[16, 2.0], [16 * 2, 1.0]])(1000) == rising([[5, 2.0]])(1000) == 2.0


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ((), StartTimes),
        (("policy.host_admission=always",), type(None)),
        (("kv.host_blocks=0",), type(None)),
        (("policy=gpu_only",), type(None)),
        (("policy=neo",), MeasuredPredictor),
    ],
)
def test_layers_are_timed_where_a_policy_judges_by_them(
    overrides: tuple[str, ...], kind: type
) -> None:
    made = plan(*overrides)
    assert made.times_layers == (kind is not type(None))
    assert type(make_learner(made)) is kind
    if kind is StartTimes:
        with_times = replace(made, profile=ProfilePlan(name="x", step_times=flat_times()))
        assert not with_times.times_layers and make_learner(with_times) is None


def layer_times(host_s: float) -> LayerTimes:
    """A GPU round takes a second, whatever it holds, a host iteration so many."""
    nothing = [(1, 0.0)]
    gpu = {"post_layer": [(1, 1.0)], "linear": nothing, "decode": nothing, "prefill": nothing}
    host = dict.fromkeys(("host", "host_pre", "host_post"), nothing)
    return {"gpu": gpu, "cpu": {**host, "host_post_layer": [(1, host_s)]}}


async def crowd(engine: Engine) -> None:
    """All are asked at once, and HBM holds one or two."""
    await engine.until(lambda: engine._stats.is_ready)
    engine.ask(range(8), prompt_len=70, max_tokens=20)
    await engine.until_answered()
    await engine.until_idle()


@pytest.mark.parametrize(
    ("host_s", "admission", "takes"),
    [(0.1, "profile", True), (1e6, "profile", False), (1e6, "always", True)],
)
def test_prompts_go_to_the_host_where_the_workers_times_say_that_it_pays(
    host_s: float, admission: str, takes: bool
) -> None:
    times = layer_times(host_s)
    engine = play(crowd, f"policy.host_admission={admission}", layer_times=times)
    assert not engine.failure and all(len(a) == 20 for a in engine.answers.values())
    assert (engine._stats.events["prefill_cpu"] > 0) == takes
    assert (engine._stats.tokens["cpu"] > 0) == takes


@pytest.mark.parametrize(("admission", "spares"), [("profile", True), ("always", False)])
def test_a_host_row_is_not_assisted_while_that_costs_several_rows_in_hbm_as_much_as_a_round(
    admission: str, spares: bool
) -> None:
    times = layer_times(0.1)
    times["gpu"] |= {"linear": [(1, 1.0)], "post_layer": [(1, 0.0)]}
    fused = ("assist.post_attention_limit=0", "assist.post_layer_limit=0", "cpu.max_batch_size=1")
    engine = play(crowd, f"policy.host_admission={admission}", *fused, layer_times=times)
    assert not engine.failure and all(len(a) == 20 for a in engine.answers.values())
    routes = {ROUTES[batch.route] for batch in engine.handle("cpu").batches}
    assert Route.FUSED_ASSIST in routes
    assert (Route.FULL_CPU in routes) == spares


def test_a_worker_that_is_back_is_judged_by_its_new_times() -> None:
    async def story(engine: Engine) -> None:
        await engine.until(lambda: engine._stats.is_ready)
        handle = engine.handle("cpu")
        handle.info = {"layer_times": layer_times(1e6)["cpu"]}
        handle.kill()
        await engine.until(lambda: handle.num_starts == 2 and handle.ready)
        await asyncio.sleep(0)
        engine.ask(range(8), prompt_len=70, max_tokens=20)
        await engine.until_answered()
        await engine.until_idle()

    engine = play(story, "policy.host_admission=profile", layer_times=layer_times(0.1))
    assert engine.restarts == [0, 1] and not engine.failure
    assert engine._stats.events["prefill_cpu"] == 0


def test_times_travel_as_json() -> None:
    """As `Ready` tells them."""
    learner = StartTimes(plan())
    for role in ("gpu", "cpu"):
        learner.learn(json.loads(json.dumps(layer_times(3.0)))[role])
    assert learner.admission.times is not None
    assert learner.admission.times.cpu_decode_s(5, 1000, 1.0) == pytest.approx(3.0)
