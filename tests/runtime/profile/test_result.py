"""From points to choices, figures, page and cost model, on machines that are made up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualpace.errors import ConfigError
from dualpace.graphs.source import resolve_source
from dualpace.runtime.profile import figures, report
from dualpace.runtime.profile.config import SweepConfig
from dualpace.runtime.profile.points import all_points
from dualpace.runtime.profile.result import choose
from dualpace.runtime.profile.simulated import as_yaml, prefill_model, simulated, table
from dualpace.runtime.profile.timing import Effort, sample
from dualpace.runtime.routing import Route, route
from dualpace.runtime.simulate.config import AssistProfileConfig
from dualpace.runtime.simulate.cost import CostModel
from dualpace.settings.resolve import resolve
from tests.runtime.profile.conftest import machine
from tests.tiny_settings import settings

SWEEP = SweepConfig()


def test_a_fast_cpu_never_asks_and_a_slow_one_always_does() -> None:
    fast = choose(machine(cpu_row_ms=0.0, gpu_ms=20.0), SWEEP, 4)
    p, f = fast.routing.chosen
    assert fast.cpu.limit == 64
    assert all(route(b, p, f) is Route.FULL_CPU for b in range(1, 65))
    slow = choose(machine(cpu_row_ms=50.0, gpu_ms=0.01), SWEEP, 4)
    assert slow.routing.chosen == (0, 0)
    assert slow.routing.regret_of((0, 0)) == 0


def test_settings_hold_all_three_controls() -> None:
    found = choose(machine(), SWEEP, 4).settings()
    assert found.keys() == {
        "post_attention_limit", "post_layer_limit", "token_limit", "cpu_batch_limit",
    }  # fmt: skip
    assert found["token_limit"] == 1024  # throughput rises to the end


def test_a_larger_lambda_asks_less() -> None:
    def calls(gpu_weight: float) -> int:
        p, f = choose(machine(), SweepConfig(gpu_weight=gpu_weight), 4).routing.chosen
        return sum(route(b, p, f) is not Route.FULL_CPU for b in (1, 16, 64, 80))

    assert calls(50.0) <= calls(0.0)
    assert calls(50.0) < 4


def test_points_that_cannot_be_fitted_are_one_sentence() -> None:
    broken = machine()
    broken[0]["values"]["samples"]["post_layer"]["ms"] = float("nan")
    with pytest.raises(ConfigError, match="cannot be fitted"):
        choose(broken, SWEEP, 4)


def test_figures_and_page_are_written(tmp_path: Path) -> None:
    choices = choose(machine(), SWEEP, 4)
    files = figures.draw(choices, machine(), "made up", tmp_path)
    assert sorted(f.name for f in files) == [
        "figure3.png", "figure3.svg", "figure7.png", "figure7.svg",
    ]  # fmt: skip
    assert all(file.stat().st_size > 10_000 for file in files)
    data = {
        "fingerprint": {"cpu": "a <CPU>", "cpu_threads": 1, "gpu": "none", "dtype": "float32",
                        "model": "4 layers"},
        "measured": {"model_source": "m", "date": "d", "points": 1, "seconds": 1.0, "warmups": 1,
                     "invocations": 1, "repeats": 1},
        "routing": {"epsilon": 0.0025},
        "beside": {64: machine()[4]["values"]},
    }  # fmt: skip
    page = report.write(tmp_path / "report.html", "mine", data, choices, None).read_text()
    assert "a &lt;CPU&gt;" in page and page.count("<svg") == 2
    assert f"(P, F) = {choices.routing.best_pair}" in page
    assert "<td>64</td><td>8.000</td><td>8.400</td><td>1.000</td><td>1.00</td><td>0.40</td>" in page


def test_the_cost_model_gives_back_what_was_measured() -> None:
    plan = resolve(settings("kv.gpu_blocks=8", "kv.host_blocks=100"))
    spec = resolve_source("random:tiny").spec
    choices = choose(machine(), SWEEP, 4)
    profile = simulated("made_up", machine(), choices, spec, plan)
    cost = CostModel(profile)
    assert cost.cpu_post_attention(16) == pytest.approx(1e-3 * (0.2 + 0.05 * 16))
    assert cost.cpu_attention(16 * 256) == pytest.approx(1e-3 * 16 * 256 / 1e5)
    assert cost.gpu_post_attention(64) == pytest.approx(1e-3)
    assert cost.gpu_decode_attention(16 * 496) == pytest.approx(1e-3 * 16 * 496 / 1e4 / 4)
    assert profile.link.gb_s == pytest.approx(10.0)
    assert profile.limits.host_blocks == 100
    assert as_yaml(profile)["defaults"] == ["simulated_schema", "_self_"]


def test_attention_is_told_from_the_rest_of_a_prefill_by_shape() -> None:
    """A round of few tokens takes what its launches take, which says nothing about attention."""
    shapes = {
        b: {
            "lengths": [
                {"length": n, "ms": 3 * (max(4.0, 0.01 * b * n) + 1e-4 * b * n * (n + 1) / 2) + 0.3}
                for n in (16, 64, 256)
            ]
        }
        for b in (1, 4)
    }
    pair, dense = prefill_model(shapes, layers=3, head_ms=0.3)
    assert pair == pytest.approx(1e-4)
    assert [dense[n] for n in (16, 64, 256, 1024)] == pytest.approx([4.0, 4.0, 4.0, 10.24])


def test_without_shapes_of_equal_size_all_time_is_the_layers() -> None:
    pair, dense = prefill_model({1: {"lengths": [{"length": 16, "ms": 8.0}]}}, 2, 0.0)
    assert (pair, dense) == (0.0, {16.0: 4.0})


def test_a_slow_moment_does_not_lift_what_is_larger() -> None:
    found = table({1: 1.0, 8: 9.0, 16: 2.0, 32: 4.0})
    assert (found.x, found.ms) == ([1.0, 8.0, 16.0, 32.0], [1.0, 2.0, 2.0, 4.0])


def test_prompts_that_ran_fast_do_not_make_decode_steps_faster() -> None:
    """Steps of few rows and prompts of many are two measurements of one curve."""
    noisy = machine()
    for shape in (s for r in noisy for s in r["values"].get("lengths", ())):
        shape["ms"] /= 20
    plan, spec = resolve(settings()), resolve_source("random:tiny").spec
    choices = choose(noisy, SWEEP, 4)
    quiet, fast = (
        CostModel(simulated("made_up", r, choices, spec, plan)) for r in (machine(), noisy)
    )
    assert fast.gpu_pre_attention(16) == quiet.gpu_pre_attention(16) > 0
    assert fast.gpu_pre_attention(256) == fast.gpu_pre_attention(64)


def assist_costs(results: list[dict[str, Any]], device: str, mode: str) -> AssistProfileConfig:
    plan = resolve(settings())
    plan = replace(
        plan, gpu=replace(plan.gpu, device=device), assist=replace(plan.assist, mode=mode)
    )
    choices = choose(results, SWEEP, 4)
    spec = resolve_source("random:tiny").spec
    return simulated("made_up", results, choices, spec, plan).assist


def test_assists_beside_the_main_batch_cost_what_was_measured_beside_it() -> None:
    found = assist_costs(machine(), "cuda", "stream")
    assert found.beside_loss == pytest.approx(0.4)
    assert found.beside_wait_ms == pytest.approx(0.3)
    assert found.beside_stretch == pytest.approx(1.0)
    assert found.launch_ms == pytest.approx(0.02)


def test_without_that_point_they_cost_what_their_kernels_take_alone() -> None:
    unmeasured = [r for r in machine(gpu_ms=2.0) if r["point"]["kind"] != "beside"]
    for result in unmeasured:
        for found in result["values"].get("assists", {}).values():
            found["parts"]["compute"] = 0.5  # of 2 ms
        for call in result["values"].get("calls", ()):
            call["device"] = 4.0
    found = assist_costs(unmeasured, "cuda", "stream")
    assert found.beside_stretch == pytest.approx(2.0)
    assert found.beside_loss == pytest.approx(0.25 / 2.0)


@pytest.mark.parametrize(("device", "mode"), [("cpu", "stream"), ("cuda", "boundary")])
def test_assists_between_stages_are_simulated_so(device: str, mode: str) -> None:
    assert assist_costs(machine(), device, mode).beside_loss is None


def test_sampling_warms_up_repeats_and_takes_the_slowest_rank() -> None:
    seen = []

    def run(i: int) -> tuple[float, float]:
        seen.append(i)
        return (0.001, 0.003) if len(seen) > 3 else (9.0, 0.0)

    taken = sample(run, Effort(warmups=3, invocations=4, repeats=2, max_seconds=1e6))
    assert seen == [0, 1, 2, *range(4), *range(4)]
    assert taken.repeats_ms == pytest.approx([3.0, 3.0])


def test_slow_primitives_are_invoked_less_often() -> None:
    effort = Effort(warmups=5, invocations=100, repeats=3, max_seconds=3.0)
    assert effort.affordable(0.1) == 10
    assert effort.affordable(50.0) == 1
    assert effort.affordable(1e-6) == 100


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"route_batches": [1, 64]}, "has no size above the largest"),
        ({"step_batches": []}, "must name sizes"),
        ({"layers": 1}, "profile.layers=1 is below 2"),
        ({"repeats": 0}, "profile.repeats=0"),
        ({"calibration_context": 0}, "profile.calibration_context=0 is below 1: raise it"),
        ({"calibration_iterations": 0}, "profile.calibration_iterations=0 is below 1: raise it"),
        ({"calibration_rows": -1}, "profile.calibration_rows=-1 is below 0 or no number"),
        ({"check_output": 0}, "profile.check_output=0 is below 1: raise it"),
        ({"prefill_max_tokens": 8}, "raise it"),
        ({"max_seconds": 0.0}, "profile.max_seconds=0.0 is no time"),
        ({"timeout_s": float("nan")}, "profile.timeout_s=nan is no time"),
        ({"gpu_weight": -1.0}, "profile.gpu_weight=-1.0 is below 0"),
        ({"epsilon": float("inf")}, "profile.epsilon=inf is below 0 or no number"),
    ],
)
def test_sweeps_that_cannot_work_are_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        all_points(SweepConfig(**changes))
