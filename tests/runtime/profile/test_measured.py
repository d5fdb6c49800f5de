"""Which settings a profile fills in, and which profiles are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dualpace import doctor
from dualpace.errors import ConfigError
from dualpace.runtime.engine.scheduler import make_state
from dualpace.runtime.plan import Plan
from dualpace.settings.compose import conf_dir, load
from dualpace.settings.machine import differences, minor_version
from dualpace.settings.measured import MeasuredProfile, settled
from dualpace.settings.resolve import resolve
from tests.runtime.schedule.predictor import flat_times
from tests.tiny_settings import settings


def plan(*overrides: str) -> Plan:
    return resolve(settings(*overrides))


def test_a_profile_fills_in_what_nobody_set(write_profile: Callable[..., str]) -> None:
    made = plan(f"hw.profile={write_profile()}")
    assert (made.assist.post_attention_limit, made.assist.post_layer_limit) == (48, 40)
    assert made.gpu.token_limit == 320
    assert made.cpu.max_batch_size == made.cpu.max_waiting == 40
    assert made.profile.settings == (
        "assist.post_attention_limit",
        "assist.post_layer_limit",
        "gpu.token_limit",
        "cpu.max_batch_size",
    )


def test_a_profiles_step_times_reach_the_plan_and_the_policy(
    write_profile: Callable[..., str],
) -> None:
    file = Path(write_profile())
    text = file.read_text()
    points = flat_times().points()
    fewer = {name: curve for name, curve in points.items() if name != "cpu_alone"}
    for of_older in ({}, {"step_times": fewer}):
        file.write_text(text + (yaml.safe_dump(of_older) if of_older else ""))
        older = plan(f"hw.profile={file}").profile
        assert older.step_times is None
        assert older.note.endswith("as set; the host tier is judged by times measured at start")
    file.write_text(text + yaml.safe_dump({"step_times": points}))
    made = plan(f"hw.profile={file}")
    assert made.profile.step_times == flat_times() and "at start" not in made.profile.note
    make_state(made, None)
    make_state(plan(f"hw.profile={file}", "policy.host_admission=always"), None)
    file.write_text(text + yaml.safe_dump({"step_times": points | {"prefill": [[1, 1]]}}))
    with pytest.raises(ConfigError, match="is no profile"):
        plan(f"hw.profile={file}")


@pytest.mark.parametrize("mode", ["stream", "boundary"])
def test_times_judge_the_host_tier_wherever_assists_are_served(mode: str) -> None:
    name = "h200_llama_31_8b"
    shipped = MeasuredProfile.read(name)
    config, taken = settled(load(f"hw.profile={name}", f"assist.mode={mode}"), shipped.fingerprint)
    assert taken.step_times == shipped.step_times is not None
    assert config.gpu.token_limit == shipped.token_limit


@pytest.mark.parametrize("hw", ["hw.profile=auto", "+hw=h200"])
def test_a_hw_file_finds_the_profile_of_this_model(hw: str) -> None:
    shipped = MeasuredProfile.read("h200_llama_31_8b")
    config, taken = settled(load(hw), shipped.fingerprint)
    assert taken.name == shipped.name and taken.step_times == shipped.step_times
    assert config.gpu.token_limit == shipped.token_limit
    assert config.assist.post_attention_limit == 0


@pytest.mark.parametrize(("key", "value"), [("model", "40 layers"), ("gpu_tp", 2)])
def test_another_model_or_tp_starts_with_safe_defaults_and_says_how_to_measure(
    key: str, value: object
) -> None:
    shipped = MeasuredProfile.read("h200_llama_31_8b")
    other = {**shipped.fingerprint, key: value}
    config, taken = settled(load("+hw=h200", "model.source=random:qwen3-14b"), other)
    assert (taken.name, taken.settings, taken.step_times) == (None, (), None)
    assert (config.gpu.token_limit, config.cpu.max_batch_size) == (1024, 256)
    assert f"{shipped.fingerprint[key]} there, {value} here" in taken.note
    command = "`python scripts/profile_hw.py +hw=h200 model.source=random:qwen3-14b`"
    assert taken.note.endswith(
        "so safe defaults where nothing was set, and the host tier is judged by times measured at "
        f"start: measure one with {command}"
    )
    with pytest.raises(ConfigError, match="was measured on something else"):
        settled(load("+hw=h200", f"hw.profile={shipped.name}"), other)


def test_of_several_profiles_that_fit_the_newest_is_taken(
    write_profile: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "measured").mkdir()
    made = yaml.safe_load(Path(write_profile()).read_text())
    for name, day in (("a", 1), ("b", 3), ("c", 2)):
        data = {**made, "name": name, "measured": {"date": f"2026-01-0{day}"}}
        (tmp_path / "measured" / f"{name}.yaml").write_text(yaml.safe_dump(data))
    monkeypatch.setattr("dualpace.settings.measured.conf_dir", lambda: str(tmp_path))
    assert plan("hw.profile=auto").profile.name == "b"


def test_explicit_settings_win_over_the_profile(write_profile: Callable[..., str]) -> None:
    made = plan(
        f"hw.profile={write_profile()}",
        "assist.post_attention_limit=0",
        "assist.post_layer_limit=0",
        "gpu.token_limit=64",
    )
    assert made.assist.post_attention_limit == 0
    assert made.gpu.token_limit == 64
    assert made.profile.settings == ("cpu.max_batch_size",)


def test_the_hard_limit_bounds_the_profiles_soft_one(write_profile: Callable[..., str]) -> None:
    made = plan(f"hw.profile={write_profile()}", "gpu.max_batched_tokens=256")
    assert made.gpu.token_limit == 256


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cpu", "Xeon 4510", "cpu Xeon 4510 there"),
        ("gpu", "NVIDIA H200", "gpu NVIDIA H200 there"),
        ("model", "32 layers", "model 32 layers there"),
        ("cpu_tp", 2, "cpu tp 2 there, 1 here"),
        ("version_torch", "2.1", "version torch 2.1 there"),
    ],
)
def test_a_foreign_profile_is_refused_with_the_command_to_run(
    write_profile: Callable[..., str], key: str, value: object, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(f"hw.profile={write_profile(**{key: value})}")
    text = str(caught.value)
    assert said in text and "\n" not in text
    assert "`python scripts/profile_hw.py model.source=random:tiny`" in text


def test_without_a_profile_defaults_are_safe_and_that_is_said() -> None:
    made = plan()
    assert made.profile.name is None
    assert made.assist.post_layer_limit == made.cpu.max_batch_size == 256
    assert made.gpu.token_limit == 1024
    assert "no profile of this machine" in made.profile.note
    for other in ("policy=gpu_only", "policy.host_admission=always", "kv.host_blocks=0"):
        assert "at start" in made.profile.note and "at start" not in plan(other).profile.note
    assert any("no profile of this machine" in line for line in made.lines())


def test_a_profile_that_is_missing_or_none_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hw\.profile=nowhere is not there"):
        plan("hw.profile=nowhere")
    empty = tmp_path / "empty.yaml"
    empty.write_text("name: x\n")
    with pytest.raises(ConfigError, match="is no profile"):
        plan(f"hw.profile={empty}")


def test_differences_name_keys_that_one_side_lacks() -> None:
    assert differences({"gpu": "H200", "same": 1}, {"same": 1}) == ["gpu H200 there, None here"]


def test_versions_are_compared_without_patch_and_build() -> None:
    found = minor_version("torch")
    assert found is not None and found.count(".") == 1 and "+" not in found
    assert minor_version("no-such-package") is None


def test_hw_files_may_name_a_profile() -> None:
    assert load("hw.profile=mine").hw.profile == "mine"


def test_the_doctor_says_which_settings_are_profiled(
    write_profile: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.run(settings(f"hw.profile={write_profile()}", "cpu.max_batch_size=16"))
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["profiled"]["gpu.token_limit"] == "320 (profiled)"
    assert report["profiled"]["cpu.max_batch_size"] == "16 (not profiled)"


def test_shipped_profiles_can_be_read_and_say_where_they_come_from() -> None:
    for file in (Path(conf_dir()) / "measured").glob("*.yaml"):
        profile = MeasuredProfile.read(file.stem)
        assert profile.name == file.stem
        assert {"cpu", "gpu", "model", "dtype"} <= profile.fingerprint.keys()
        assert "date:" in file.read_text()


def test_hw_files_look_for_a_profile() -> None:
    for file in (Path(conf_dir()) / "hw").glob("*.yaml"):
        assert load(f"+hw={file.stem}").hw.profile == "auto"
