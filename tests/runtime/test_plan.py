"""The plan travels as JSON and comes back equal, frozen and hashable."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from dualpace.runtime.plan import Plan, PolicyPlan, ProfilePlan
from dualpace.settings.resolve import resolve
from tests.runtime.schedule.predictor import flat_times
from tests.tiny_settings import settings


def tiny_plan() -> Plan:
    return resolve(settings("kv.gpu_blocks=8"))


def test_round_trip_keeps_every_value() -> None:
    plan = replace(
        tiny_plan(),
        policy=PolicyPlan(
            name="dualpace", lockstep=False, options=(("gap", 2), ("share", 0.5), ("on", True))
        ),
        compile=replace(tiny_plan().compile, candidates_cpu=("eager", "packed")),
    )
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.compile.candidates_cpu == ("eager", "packed")
    assert again.gpu.cores == plan.gpu.cores
    assert again.policy.options == plan.policy.options


def test_predicted_step_times_travel_along_and_stay_out_of_the_log() -> None:
    plan = replace(tiny_plan(), profile=ProfilePlan(name="here", step_times=flat_times()))
    assert Plan.from_json(plan.to_json()) == plan
    assert "sizes" not in "".join(plan.lines())


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        tiny_plan().gpu.threads = 4  # type: ignore[misc]


def test_a_plan_with_a_missing_value_is_refused() -> None:
    values = json.loads(tiny_plan().to_json())
    del values["kv"]["gpu_blocks"]
    with pytest.raises(KeyError, match="gpu_blocks"):
        Plan.from_json(json.dumps(values))


def test_lines_show_every_group_once() -> None:
    lines = tiny_plan().lines()
    assert lines[0] == "hw: auto"
    assert [line.split(":")[0] for line in lines][1:4] == ["model", "compile", "gpu"]
    assert any("gpu_blocks=8" in line for line in lines)
    assert "runtime: " in lines[9] and "(" not in lines[9]  # tuples as people write them
    assert "round_log=null" in lines[9] and "look_ahead=true" in lines[9]  # and these too
    assert not any(word in line for line in lines for word in ("None", "True", "False"))


@pytest.mark.parametrize(
    ("name", "told"),
    [(None, None), ("h200_v1.2", "h200_v1.2"), ("/home/me/mine/box.yaml", "box")],
)
def test_clients_learn_a_profiles_name_and_no_folder(name: str | None, told: str | None) -> None:
    assert ProfilePlan(name=name).public_name == told
