"""Whole sweeps of a tiny model: files, fits and figures; failures, resuming, other machines."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualpace.errors import ConfigError
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.child import Order, point_file, run
from dualpace.runtime.profile.config import SweepConfig
from dualpace.runtime.profile.finish import finish
from dualpace.runtime.profile.points import Point, all_points
from dualpace.runtime.profile.setting import measuring_plan
from dualpace.runtime.profile.sweep import Sweep, default_name
from dualpace.settings.compose import conf_dir, load
from dualpace.settings.hardware import probe
from dualpace.settings.resolve import resolve
from dualpace.settings.schema import ProfileHwConfig
from tests.servers import PATIENCE_S
from tests.tiny_settings import settings

ROOT = Path(__file__).resolve().parents[3]
SMALL = {
    "route_batches": [1, 4, 6],
    "beside_batches": [4],
    "decode_batches": [1, 4],
    "decode_contexts": [16, 40],
    "prefill_batches": [1, 2],
    "prefill_lengths": [8, 24],
    "step_batches": [1, 4],
    "step_contexts": [16, 40],
    "copy_blocks": 4,
    "calibration_rows": 2,
    "calibration_context": 20,
    "calibration_iterations": 2,
    "warmups": 1,
    "invocations": 2,
    "repeats": 2,
    "max_seconds": 0.05,
}


def config(folder: Path, **changes: object) -> ProfileHwConfig:
    folders = {"results": str(folder / "points"), "out": str(folder / "out")}
    overrides = {"share_child": True, "check": False, **folders, **SMALL, **changes}
    made = load("model=tiny_random", "compile=eager", "gpu.device=cpu", root="profile_hw")
    assert isinstance(made, ProfileHwConfig)
    made.profile = SweepConfig(**overrides)
    return made


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sweep]:
    """A whole sweep, measured once for all tests."""
    folder = tmp_path_factory.mktemp("sweep")
    sweep = Sweep(config(folder))
    assert sweep.measure() == {}
    return folder, sweep


def test_a_sweep_ends_with_a_profile_that_serving_takes(finished: tuple[Path, Sweep]) -> None:
    _, sweep = finished
    line = finish(sweep)
    assert json.loads(json.dumps(line))["settings"] == line["settings"]
    for name in ("profile", "simulated", "report"):
        assert Path(line[name]).is_file()
    data = yaml.safe_load(Path(line["profile"]).read_text())
    assert data["measured"]["points"] == 11 and data["measured"]["date"].startswith("20")
    plan = resolve(settings(f"hw.profile={line['profile']}", "compile.backend=eager"))
    assert plan.profile.name == line["profile"]
    assert plan.gpu.token_limit == line["settings"]["token_limit"]
    assert plan.cpu.max_batch_size == line["settings"]["cpu_batch_limit"] in (1, 4)


def test_points_hold_times_provenance_and_both_sides_of_every_assist(
    finished: tuple[Path, Sweep],
) -> None:
    _, sweep = finished
    found = sweep.result(Point("route", 4))
    assert found is not None
    assert found["provenance"]["versions"]["torch"]
    assert all(s["ms"] > 0 for s in found["values"]["samples"].values())
    calls = found["values"]["calls"]
    kinds = Counter(call["kind"] for call in calls)
    # Two layers: a fused iteration has one assist in the middle and one at the end.
    assert kinds[0] == kinds[1] >= 1 and kinds[2] >= 1
    assert all(call["rows"] == 4 and call["wait"] > 0 and call["device"] > 0 for call in calls)


def test_a_step_beside_assists_is_set_beside_one_without(finished: tuple[Path, Sweep]) -> None:
    _, sweep = finished
    found = sweep.result(Point("beside", 4))
    assert found is not None
    values = found["values"]
    assert 1 <= values["assists"] <= 4 and values["steps"] >= 1
    assert min(values["alone_ms"], values["beside_ms"], values["assist_ms"]) > 0
    longer = values["steps"] * (values["beside_ms"] - values["alone_ms"])
    assert values["loss"] == pytest.approx(
        max(longer, 0.0) / (values["assists"] * values["assist_ms"])
    )


def test_a_rerun_measures_only_what_a_child_that_died_has_left(
    finished: tuple[Path, Sweep],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Here by a multirun, a job a point."""
    folder, sweep = finished
    kept, lost = (point_file(sweep.folder, Point("decode", batch)) for batch in (4, 1))
    before = kept.stat().st_mtime_ns
    lost.unlink()
    with pytest.raises(ConfigError, match="1 points are not measured yet \\(decode-1\\)"):
        finish(sweep)
    caplog.set_level("INFO")
    with monkeypatch.context() as patch:
        patch.setattr("dualpace.runtime.profile.sweep.CHILD", "dualpace.no_such_module")
        failed = Sweep(config(folder)).measure()
    assert failed.keys() == {"decode-1"} and "no_such_module" in failed["decode-1"]
    assert f"measuring 1 points, results and logs in {folder}" in caplog.text
    last = multirun(folder, "profile.point=decode-4,decode-1")
    assert last["points"] == [str(lost)]
    assert lost.is_file() and kept.stat().st_mtime_ns == before
    assert not kept.with_suffix(".log").exists(), "there was nothing to measure"
    assert Sweep(config(folder)).measure() == {}


def multirun(folder: Path, *words: str) -> dict[str, Any]:
    """What its last job printed. With the settings of `config`, but for its process."""
    sizes = [f"profile.{key}={value}".replace(" ", "") for key, value in SMALL.items()]
    command = [sys.executable, str(ROOT / "scripts" / "profile_hw.py"), "-m", "model=tiny_random"]
    command += ["compile=eager", "gpu.device=cpu", f"profile.results={folder / 'points'}", *sizes]
    done = subprocess.run(
        [*command, "profile.layers=null", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def test_points_of_other_settings_or_another_machine_do_not_count(
    finished: tuple[Path, Sweep],
) -> None:
    folder, sweep = finished
    point = Point("route", 1)
    assert sweep.result(point) is not None
    assert Sweep(config(folder, epsilon=0.5)).result(point) is not None  # the fits' own
    assert Sweep(config(folder, repeats=3)).result(point) is None
    assert Sweep(config(folder, decode_contexts=[16])).result(point) is not None
    sweep.fingerprint["cpu"] = "another"
    try:
        assert sweep.result(point) is None
    finally:
        sweep.fingerprint = Sweep(config(folder)).fingerprint


def test_one_point_that_fails_leaves_the_others_and_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(config(tmp_path))
    points = [Point("decode", 1), Point("decode", 99), Point("decode", 4)]
    plan = measuring_plan(sweep.config, sweep.settings, points[::2], sweep.hardware)
    order = Order(0, str(sweep.folder), plan.to_json(), sweep.settings, points, [{}, {}, {}])
    assert Order.from_json(order.to_json()) == order
    assert run(order, Plan.from_json(order.plan)) == 1  # 99 rows do not fit this pool
    assert [point_file(sweep.folder, p).is_file() for p in points] == [True, False, True]
    assert "decode-99: AssertionError" in capfd.readouterr().err


def test_a_child_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    failed = Sweep(config(tmp_path, point="route-1", timeout_s=0.5)).measure()
    assert failed == {"route-1": "stopped after profile.timeout_s=0.5 s"}


def test_an_unknown_point_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose fit or one of route-1, route-4"):
        Sweep(config(tmp_path, point="route-5"))


@pytest.mark.parametrize("key", ["results", "out", "figures"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    key: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=rf"profile\.{key}={file} cannot be written"):
        Sweep(config(tmp_path, **{key: str(file)}))


@pytest.mark.parametrize("name", ["mine/box", "..", ""])
def test_a_name_with_folders_is_refused_before_anything_is_measured(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^profile\.name={name} is no name of a file: leave"):
        Sweep(config(tmp_path, name=name))


def test_every_point_is_measured_under_the_limits_of_the_whole_sweep(tmp_path: Path) -> None:
    made = config(tmp_path)
    plans = [
        measuring_plan(made, made.profile, [point], probe())
        for point in (Point("route", 1), Point("decode", 4))
    ]
    assert plans[0].compile == plans[1].compile and plans[0].cpu == plans[1].cpu
    assert plans[0].model == plans[1].model  # its context too, which graphs depend on
    assert plans[0].kv != plans[1].kv
    assert plans[0].cpu.max_batch_size == 6
    assert plans[0].assist.post_attention_limit == 0


def test_fewer_layers_of_random_weights_are_a_smaller_model(tmp_path: Path) -> None:
    made = config(tmp_path, layers=2)
    made.model.source = "random:llama-3.2-1b"
    plan = measuring_plan(made, made.profile, [Point("decode", 1)], probe())
    assert plan.model.num_layers == 2
    assert plan.model.hidden == 2048
    assert default_name(made) == "here_llama_32_1b"


def test_contexts_beyond_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="100000 tokens, is beyond the model's"):
        Sweep(config(tmp_path, step_contexts=[16, 100000]))


def test_names_say_machine_and_model() -> None:
    made = load("+hw=cpu", "model=llama31_8b_random", root="profile_hw")
    assert isinstance(made, ProfileHwConfig)
    assert default_name(made) == "cpu_llama_31_8b"


@pytest.mark.parametrize("file", sorted((Path(conf_dir()) / "profile").glob("*.yaml")))
def test_every_sweep_that_is_shipped_can_be_planned(file: Path) -> None:
    made = load(f"profile={file.stem}", root="profile_hw")
    assert isinstance(made, ProfileHwConfig)
    assert max(point.batch for point in all_points(made.profile) if point.kind == "route") == 320
