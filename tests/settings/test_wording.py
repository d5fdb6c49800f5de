"""Mistakes in settings get one sentence, the same on the command line and from `LLM`; and every
setting says what it means."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dualpace.errors import ConfigError
from dualpace.settings.compose import check_words, load
from dualpace.settings.meaning import meanings, summary
from dualpace.settings.schema import ROOTS, VARIANTS
from dualpace.settings.wording import unknown_option


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("gpu.max_bach=8", "gpu.max_bach is no setting: did you mean gpu.max_batch_size?"),
        ("gpu_blocks=8", "gpu_blocks is no setting: did you mean kv.gpu_blocks?"),
        ("port=9000", "port is no setting: did you mean server.port?"),
        ("gpu.look_ahead=true", "gpu.look_ahead is no setting: did you mean runtime.look_ahead?"),
        ("gpu.colour=red", "gpu.colour is no setting: --help lists all."),
        ("max_model_len=100", "max_model_len is no setting: did you mean model.max_context?"),
        ("max_num_seqs=8", "max_num_seqs is no setting: did you mean gpu.max_batch_size?"),
        ("modle=smollm2", "modle is no setting: did you mean model?"),
        ("gpu.threads=two", "gpu.threads=two does not fit: gpu.threads takes int or null."),
        ("model.source=null", "model.source=null does not fit: model.source takes str."),
        (
            "compile.buckets=[1,x]",
            "compile.buckets=[1,x] does not fit: "
            "Value 'x' of type 'str' could not be converted to Integer.",
        ),
        ("+server.port=3", "server.port is set without a plus in front: server.port=VALUE."),
        ("policy=fifo", "policy=fifo is unknown: choose one of dualpace, gpu_only, neo"),
        ("model=/models/mine", "name a folder or file with model.source=/path."),
        ("+hw=abacus", "hw=abacus is unknown: choose one of cpu, h200, h20x2, h20x4, rtx4090."),
        ("hw=h200", "hw is chosen with a plus in front: +hw=NAME."),
        ("workload=azure", "workload is no group of this command: --help lists those that are."),
        ("gpu.threads", "gpu.threads cannot be read: write key=value, and put a value"),
        (
            "model.source=a=b",
            "model.source=a=b cannot be read: put the value in quotes of its own, as in "
            "'model.source=\"a=b\"'.",
        ),
        ("model.name=Jürgen", "as in 'model.name=\"Jürgen\"'."),
        ("model.name=[a", "write key=value, and put a value that holds any of = , [ ] { } in"),
        ("model.source=~/x", "model.source=~/x cannot be read: write $HOME in place of ~."),
        ("server.port=1,2", "server.port=1,2 has several values: for a list write [a,b]"),
        ("gpu=2", "A group is set to one of its choices, group=choice"),
        (
            "+gpu.colour=red",
            "gpu.colour is no setting: a + adds only hw and experiment; --help lists all settings.",
        ),
        (
            "++colour=red",
            "colour is no setting: a + adds only hw and experiment; --help lists all settings.",
        ),
        ("=red", "A word begins with =: write key=value."),
        ("model@paint=smollm2", "model@paint is no group of this command: --help lists those that"),
        (
            "~gpu.tp",
            "~gpu.tp: no setting can be taken away; give it another value, or leave it alone.",
        ),
        ("+hw=cpu +hw=h200", "hw is chosen twice, as cpu and as h200: keep one of them."),
        ("policy=neo policy=paper", "policy is chosen twice, as neo and as paper: keep one of "),
        ("gpu.device=${oc.env:NOT_SET}", "gpu.device refers to what is not there"),
    ],
)
def test_a_mistake_is_one_sentence(overrides: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*overrides.split())
    text = str(caught.value)
    assert sentence in text
    assert text[-1] in ".?" and "\n" not in text and "Config" not in text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hw: {cores: 1}", "hw/own.yaml sets hw inside of hw: begin the file with the line '# @"),
        ("# @package _global_\nhw: {cors: 1}", "In hw/own.yaml, hw.cors is no setting: did you "),
        ("# @package _global_\nhw: {cores: x}", "hw.cores in hw/own.yaml does not fit: hw.cores"),
        ("- a\n- b", "hw/own.yaml has ['a', 'b'] in place of settings, which are written key: "),
        ("# @package _global_\nhw: 5", "hw/own.yaml has 5 in place of settings, which are "),
        ("# @package _global_\ndefaults: policy", "Invalid defaults list in 'hw/own', defaults "),
        ("hw: {cores: 1\n", "/hw/own.yaml, line 2, is not valid YAML: expected ',' or '}'"),
        ("hw:\n\tcores: 1", "/hw/own.yaml, line 2, is not valid YAML: found character '\\t' that"),
        ("hw: {}\nhw: {}", "/hw/own.yaml, line 2, is not valid YAML: found duplicate key hw"),
    ],
)
def test_a_mistake_in_a_file_of_ones_own_names_it(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "hw").mkdir()
    (tmp_path / "hw" / "own.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(f"hydra.searchpath=['file://{tmp_path}']", "+hw=own")
    said = str(caught.value)
    assert said.removeprefix(str(tmp_path)).startswith(sentence)
    assert said[-1] in ".?" and "\n" not in said


def test_a_policy_of_ones_own_has_to_name_its_schema(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    file = tmp_path / "policy" / "own.yaml"
    file.write_text("name: neo\nskips_longer: false\n")
    words = (f"hydra.searchpath=['file://{tmp_path}']", "policy=own")
    with pytest.raises(ConfigError) as caught:
        load(*words)
    assert str(caught.value) == (
        "policy/own.yaml sets skips_longer of a schema that it does not name: begin the file with "
        "the line 'defaults: [neo_schema, _self_]'."
    )
    file.write_text("defaults: [neo_schema, _self_]\nskips_longer: false\n")
    assert load(*words).policy.skips_longer is False


def test_a_file_that_is_no_text_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "hw").mkdir()
    (tmp_path / "hw" / "own.yaml").write_bytes(b"# @package _global_\nhw: {name: \xe9}\n")
    with pytest.raises(ConfigError, match=r"/hw/own\.yaml, line 2, is not UTF-8 .* byte 0xe9\.$"):
        check_words(["--config-dir", str(tmp_path), "+hw=own"], "serve")


@pytest.mark.parametrize("choice", ["azure", "sharegpt"])
def test_a_workload_without_its_file_asks_for_it(choice: str) -> None:
    with pytest.raises(ConfigError, match=r"^workload\.path=FILE is needed, the path of the "):
        load(f"workload={choice}", root="simulate")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--port 8101", "write server.port=8101."),
        ("--port=8101", "write server.port=8101."),
        ("--prot", "write server.port=VALUE."),
        ("--model x", "write model.source=x."),
        ("--policy neo", "write policy=neo."),
        ("--hw cpu", "write +hw=cpu."),
        ("--server.port 1", "write server.port=1."),
        ("--max-batch-size 8", "write gpu.max_batch_size=8 or cpu.max_batch_size=8."),
        ("--tensor-parallel-size 2", "write gpu.tp=2."),
        ("--max-model-len=100", "write model.max_context=100."),
        ("--zzzzzz", "settings are written key=value, and --help lists them."),
    ],
)
def test_an_option_that_is_none_names_the_setting(words: str, advice: str) -> None:
    option = words.split()[0]
    text = unknown_option("serve", option, words.split())
    assert text == f"{option.partition('=')[0]} is no option: {advice}"


def test_a_setting_behind_an_option_behind_a_setting_is_no_option() -> None:
    text = unknown_option("serve", "policy=neo,paper", ["gpu.tp=1", "-m", "policy=neo,paper"])
    assert text == (
        "policy=neo,paper follows an option that follows a setting: write options before settings."
    )


def leaves(schema: type) -> Iterator[tuple[type, str]]:
    """(schema, name) of each setting that is no group."""
    for name, meaning in meanings(schema).items():
        if dataclasses.is_dataclass(meaning.default):
            yield from leaves(type(meaning.default))
        elif meaning.default != "???":
            yield schema, name


def test_every_setting_of_serve_and_bench_says_what_it_means() -> None:
    roots = [ROOTS["serve_schema"], ROOTS["bench_schema"], ROOTS["plot_schema"]]
    variants = [schema for (group, _), schema in VARIANTS.items() if group != "simulated"]
    silent = {
        f"{schema.__name__}.{name}"
        for root in [*roots, *variants]
        for schema, name in leaves(root)
        if name != "name" and not meanings(schema)[name].text
    }
    assert silent == set()
    assert all(summary(schema) for root in roots for schema, _ in leaves(root))


@dataclass
class Example:
    """One line,
    wrapped.

    More of it.
    """

    behind: int = 1  # stands behind
    # Stands above, over
    # two lines
    above: int | None = None
    goes_on: list[int] = field(default_factory=list)  # begins behind and
    # goes on below; None: nothing
    last: str = "#"  # the sign in the value is no comment


@dataclass
class Derived(Example):
    """Another."""

    last: str = "?"
    own: bool = True  # its own


def test_a_meaning_stands_behind_its_field_or_above_it() -> None:
    found = {name: meaning.text for name, meaning in meanings(Derived).items()}
    assert found == {
        "behind": "stands behind",
        "above": "Stands above, over two lines",
        "goes_on": "begins behind and goes on below; null: nothing",
        "last": "the sign in the value is no comment",
        "own": "its own",
    }
    assert meanings(Derived)["above"].type == "int or null"
    assert meanings(Derived)["goes_on"].type == "list of int"
    assert meanings(Derived)["last"].default == "?"
    assert summary(Example) == "One line, wrapped."


def test_a_plus_of_another_command_says_whose_it_is() -> None:
    with pytest.raises(
        ConfigError, match=r"^\+experiment=fig8: serve has no experiment; it is for"
    ):
        load("+experiment=fig8")
