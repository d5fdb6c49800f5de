"""Every YAML file composes and checks; the key set is frozen; bad values get a sentence."""

import dataclasses
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dualpace.errors import ConfigError
from dualpace.graphs.backends import BACKENDS as BUILT_BACKENDS
from dualpace.graphs.config import BACKENDS
from dualpace.graphs.source import resolve_source
from dualpace.settings.check import check
from dualpace.settings.compose import conf_dir, help_text, load, register
from dualpace.settings.paths import default_cache
from dualpace.settings.schema import ServeConfig
from tests.tiny_settings import settings

CONF = Path(conf_dir())
SNAPSHOT = Path(__file__).parents[1] / "data" / "config_keys.txt"
GROUPS = ("model", "policy", "compile", "gpu", "cpu", "kv", "server")


def choices() -> list[str]:
    found = [f"{group}={file.stem}" for group in GROUPS for file in (CONF / group).glob("*.yaml")]
    appended = [f"+hw={file.stem}" for file in (CONF / "hw").glob("*.yaml")]
    return sorted(found + appended)


@pytest.mark.parametrize("choice", choices())
def test_every_file_of_every_group_composes_and_checks(choice: str) -> None:
    assert isinstance(load(choice), ServeConfig)


@pytest.mark.parametrize("file", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda f: f.stem)
def test_experiments_are_deltas_that_choose_no_machine(file: Path) -> None:
    config = load("+hw=cpu", f"+experiment={file.stem}", "kv.host_gib=null", root="bench")
    assert config.bench.figures and config.bench.out and config.hw.name == "cpu"
    assert "hw" not in OmegaConf.create(file.read_text())


@pytest.mark.parametrize("file", sorted((CONF / "model").glob("*.yaml")), ids=lambda f: f.stem)
def test_model_files_name_a_model_that_is_known(file: Path) -> None:
    source = resolve_source(OmegaConf.load(file)["source"])
    billions = file.stem.removesuffix("_random").rpartition("_")[2].removesuffix("b")
    if billions.isdecimal():
        assert round(source.spec.num_parameters() / 1e9) in (int(billions), int(billions) + 1)


@pytest.mark.parametrize("file", sorted((CONF / "hw").glob("*.yaml")), ids=lambda f: f.stem)
def test_hw_files_state_facts_and_choices_only(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# @package _global_\n")
    assert set(OmegaConf.create(text)) <= {"defaults", "hw"}
    assert OmegaConf.create(text).hw.name == file.stem


@pytest.mark.parametrize("name", ["serve", "doctor", "bench", "simulate", "profile_hw", "plot"])
def test_each_command_has_help_of_its_own(name: str) -> None:
    register()
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        hydra = compose(name, return_hydra_config=True).hydra
    assert hydra.help.app_name == name and hydra.job.name == name
    assert hydra.help.header.startswith(f"{name} - ")


@pytest.mark.parametrize("flag", ["--config-dir {}", "--config-dir={}"])
def test_help_shows_what_a_command_line_results_in(flag: str, tmp_path: Path) -> None:
    (tmp_path / "hw").mkdir()
    (tmp_path / "hw" / "mybox.yaml").write_text(
        "# @package _global_\nhw: {name: mybox, cores: 3}\n"
    )
    words = [*flag.format(tmp_path).split(), "+hw=mybox", "compile.buckets=[1,8]", "--help"]
    text = help_text("serve", words)
    for line in (
        "+hw: cpu, h200, h20x2, h20x4, mybox, rtx4090",
        "  cores: 3  ",
        "  buckets: [1, 8]",
    ):
        assert line in text


def keys(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [prefix]
    return list(chain.from_iterable(keys(v, f"{prefix}.{k}".strip(".")) for k, v in node.items()))


def test_the_key_set_is_frozen() -> None:
    """A new or lost setting is a decision: change the snapshot in the same commit."""
    found = sorted(keys(dataclasses.asdict(load())))
    assert found == SNAPSHOT.read_text().split()


def test_an_experiment_or_command_line_value_beats_the_hw_file() -> None:
    assert load("+hw=h20x2", "gpu.tp=1").gpu.tp == 1
    assert load("+hw=h20x2", "gpu=default").gpu.tp == 1


def test_keys_of_another_policy_are_refused() -> None:
    with pytest.raises(ConfigError, match="token_gap"):
        load("policy=neo", "policy.token_gap=3")


def test_backends_are_those_that_are_built() -> None:
    assert set(BACKENDS) == {"auto", *BUILT_BACKENDS}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("model.dtype=int4", "model.dtype=int4 is unknown: choose one of auto, bf16, float32"),
        ("gpu.device=tpu", "gpu.device=tpu is unknown: choose one of auto, cpu, cuda"),
        ("kv.output_estimate=oracle", "kv.output_estimate=oracle is unknown"),
        ("compile.backend=xla", "compile.backend=xla is unknown"),
        ("compile.backend_cpu=xla", "compile.backend_cpu=xla is unknown"),
        ("gpu.max_batch_size=0", "gpu.max_batch_size=0 is below 1"),
        ("cpu.threads=0", "cpu.threads=0 is below 1"),
        ("kv.gpu_blocks=0", "kv.gpu_blocks=0 is below 1"),
        ("kv.gpu_gib=-0.5", "kv.gpu_gib=-0.5 is not above 0"),
        ("kv.host_blocks=-1", "kv.host_blocks=-1 is negative"),
        ("kv.gpu_blocks=8 kv.gpu_gib=1", "both size one pool"),
        (
            "gpu.token_limit=4096 gpu.max_batched_tokens=1024",
            "gpu.max_batched_tokens=1024 is below gpu.token_limit=4096: raise the first",
        ),
        (
            "gpu.token_limit=64 gpu.max_batched_tokens=64",
            "gpu.max_batched_tokens=64 is below gpu.max_batch_size=256",
        ),
        ("assist.post_layer_limit=4", "assist.post_layer_limit is set without"),
        (
            "assist.post_attention_limit=4 assist.post_layer_limit=4",
            "assist.post_attention_limit=4 and assist.post_layer_limit=4 are no legal pair",
        ),
        ("compile.buckets=[4,0]", "compile.buckets[1]=0 is below 1"),
        ("compile.buckets=[]", "compile.buckets=[] lists no row counts"),
        ("server.port=70000", "server.port=70000 is no TCP port"),
        ("server.host=''", "server.host is empty: use 127.0.0.1"),
        ("model.name=''", "model.name is empty: name the model for clients, or leave it out."),
        ("server.drain_timeout_s=.inf", "server.drain_timeout_s=inf is no finite number"),
        ("kv.gpu_gib=.inf", "kv.gpu_gib=inf is no finite number"),
        ("kv.host_gib=.nan", "kv.host_gib=nan is no finite number"),
        ("hw.host_gib=.nan", "hw.host_gib=nan is no finite number"),
        ("hw.vram_gib=0", "hw.vram_gib=0 is not above 0"),
        ("hw.cores=-1", "hw.cores=-1 is below 1"),
        ("hw.gpus=-1", "hw.gpus=-1 is negative"),
        ("model.source=''", "model.source is empty"),
        ("model.seed=99999999999999999999", "is no seed: use 0 to 9223372036854775807"),
        ("model.seed=-1", "is no seed: use 0 to"),
        ("runtime.round_log=a runtime.request_log=./a", "both name a: name two files"),
        ("model.max_context=1", "model.max_context=1 holds no prompt with its answer"),
        ("policy=neo policy.launch_ms=-1", "policy.launch_ms=-1 is no number from 0 on"),
        ("policy=neo policy.launch_ms=.nan", "policy.launch_ms=nan is no number from 0 on"),
        ("policy.migrate_every=-1", "policy.migrate_every=-1 is negative"),
        ("policy.name=neo", "policy.name=neo cannot be set by itself: choose policy=neo"),
        ("server.drain_timeout_s=-1", "server.drain_timeout_s=-1 is negative"),
    ],
)
def test_impossible_values_get_one_sentence(overrides: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(settings(*overrides.split()))
    text = str(caught.value)
    assert sentence in text
    assert text.endswith(".") and "\n" not in text


def test_the_cache_is_in_no_folder_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in it is run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert default_cache() == str(tmp_path / "mine" / "dualpace")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Path(default_cache())
    assert made.parent == tmp_path and made.stat().st_mode & 0o077 == 0
    made.chmod(0o777)
    with pytest.raises(ConfigError, match="may be written by others"):
        default_cache()
    made.rmdir()
    made.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="may be written by others"):
        default_cache()
    made.unlink()
    made.touch()
    with pytest.raises(ConfigError, match=r"cannot be made \(File exists\): set compile.cache_dir"):
        default_cache()
