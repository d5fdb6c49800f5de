"""Forms compiled by xgrammar for a real vocabulary: what may come next, where an answer may end,
what is refused."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dualpace import StructuredOutputsParams
from dualpace.graphs.source import resolve_source
from dualpace.graphs.tokenizer import Tokenizer, load_tokenizer
from dualpace.runtime.engine.compiler import XgrammarCompiler
from dualpace.runtime.engine.forms import FormRefused
from dualpace.runtime.engine.guides import Guide
from tests.runtime.test_structured import PERSON

VOCAB = 49152  # SmolLM2's
PADDING = 77  # tokens that the model has and the tokenizer has not
ENDS = (2, 0)  # several, as Llama's
VALUE = {
    "name": 'An "é" 日本',
    "code": "éé",
    "age": None,
    "kind": 1,
    "tag": "t",
    "name2": "Ab.1",
    "born": "1960-01-02",
    "even": 14,
    "friend": {"if": "x"},
    "pets": [{}, {"if": "y"}],
    "pair": [-1.5e3, {"any": [True]}],
}


def model(**changes: Any) -> Any:
    usual = {"source": "smollm2", "vocab": VOCAB + PADDING, "eos_token_ids": ENDS}
    return SimpleNamespace(**usual | changes)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_source("smollm2"))


@pytest.fixture(scope="module")
def compiler() -> XgrammarCompiler:
    return XgrammarCompiler(model())


def guide(compiler: XgrammarCompiler, **asked: Any) -> Guide:
    kind, text, _ = StructuredOutputsParams(**asked).structure
    return compiler.compile(kind, text).guide()


def left(guide: Guide) -> set[int]:
    bits = np.unpackbits(guide.mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def takes(guide: Guide, tokens: list[int]) -> bool:
    """Whether they come to a whole answer; a token is accepted if the mask has it."""
    for token in tokens:
        allowed = guide.allows(token)
        assert guide.follow(token) == allowed
        if not allowed:
            return False
    assert guide.is_complete == (left(guide) >= set(ENDS))
    return guide.is_complete


def test_a_choice_leaves_the_tokens_that_begin_it(
    compiler: XgrammarCompiler, tokenizer: Tokenizer
) -> None:
    choices = [b"maybe", b"may not", "日本".encode()]
    made = guide(compiler, choice=[choice.decode() for choice in choices])
    spelled = {i: tokenizer.token_bytes(i) for i in range(VOCAB)}
    text = b""
    while not made.is_complete:
        rest = [choice[len(text) :] for choice in choices if choice.startswith(text)]
        wanted = {i for i, b in spelled.items() if b and any(r.startswith(b) for r in rest)}
        assert left(made) == wanted - tokenizer.special_ids
        token = max(wanted)
        assert made.follow(token)
        text += spelled[token]
    assert text in choices and left(made) == set(ENDS)


def test_no_token_without_text_is_left(compiler: XgrammarCompiler, tokenizer: Tokenizer) -> None:
    """Special ones are spelled in letters, and would look like some."""
    never = tokenizer.special_ids | set(range(VOCAB, VOCAB + PADDING))
    made = guide(compiler, regex=r"[^\n]*")
    assert left(made) & never == set(ENDS) and len(left(made)) > VOCAB / 2
    assert made.follow(tokenizer.encode("<")[0]) and left(made) & never == set(ENDS)


@pytest.mark.parametrize("indent", [None, 4])
def test_an_answer_by_a_schema(
    compiler: XgrammarCompiler, tokenizer: Tokenizer, indent: int | None
) -> None:
    text = json.dumps(VALUE, indent=indent, ensure_ascii=False)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert takes(guide(compiler, json=PERSON), tokens) == (indent is None)
    assert takes(guide(compiler, json=PERSON, disable_any_whitespace=False), tokens)
    assert takes(guide(compiler, json_object=True), tokens)
    assert not takes(guide(compiler, json_object=True), tokenizer.encode("{" + " " * 40 + "}"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("code", "abcd"),
        ("age", "x"),
        ("kind", 2),
        ("born", "yesterday"),
        ("even", 3),
        ("pair", [1, 2, 3]),
        ("z", 1),
    ],
)
def test_no_other_value_passes(
    compiler: XgrammarCompiler, tokenizer: Tokenizer, name: str, value: Any
) -> None:
    tokens = tokenizer.encode(
        json.dumps(VALUE | {name: value}, ensure_ascii=False), add_special_tokens=False
    )
    assert not takes(guide(compiler, json=PERSON), tokens)


def test_no_string_has_a_control_character(
    compiler: XgrammarCompiler, tokenizer: Tokenizer
) -> None:
    controls = {i for i in range(VOCAB) if set(tokenizer.token_bytes(i)) & {*range(32)}}
    for schema in ({"type": "string"}, {"type": "string", "maxLength": 9}):
        for on_one_line in (True, False):
            made = guide(compiler, json=schema, disable_any_whitespace=on_one_line)
            assert all(map(made.follow, tokenizer.encode('"a', add_special_tokens=False)))
            assert not left(made) & controls


def test_a_grammar_and_a_regular_expression_are_the_whole_answer(
    compiler: XgrammarCompiler, tokenizer: Tokenizer
) -> None:
    sums = {"grammar": 'root ::= [0-9]+ ("+" root)?', "regex": r"\d+(\+\d+)*"}
    for way, form in sums.items():
        for text, fits in (("12+3", True), ("12+", False), (" 1", False)):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            assert takes(guide(compiler, **{way: form}), tokens) == fits


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"regex": "(a"}, "the regular expression cannot be compiled: regex parsing error at posi"),
        ({"grammar": "start ::= x"}, "the grammar cannot be compiled: EBNF parser error at line 1"),
        ({"json": {"$ref": "#/$defs/x"}}, "the schema cannot be compiled: "),
    ],
)
def test_what_cannot_be_compiled_is_told(
    compiler: XgrammarCompiler, asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(FormRefused) as refusal:
        guide(compiler, **asked)
    assert sentence in str(refusal.value) and "/cpp/" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        *(r"^a\ b\-c\_d\é\~$", "(?:a)(?<n>b)", "a*?b+?c{2}?d{2,}e{2,5}", r"[\ \_$^]\u0041\x41"),
        *("(" * 64 + "a" + ")" * 64, r"\d\D\w\W\s\S[^a]\$\^\.\/\'\|\(\)\[\]\{\}\*\+\?"),
    ],
)
def test_what_is_compiled_is_compiled_without_a_warning(
    compiler: XgrammarCompiler, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    """The library would write it past the server's log."""
    guide(compiler, regex=text)
    guide(compiler, json={"type": "string", "pattern": text})
    assert capfd.readouterr().err == ""


def test_without_the_library_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(FormRefused, match=r"pip install dualpace\[structured\]"):
        XgrammarCompiler(model())


def test_without_a_tokenizer_there_is_no_form(tmp_path: Path) -> None:
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    sizes |= dict.fromkeys(("hidden_size", "head_dim", "intermediate_size", "vocab_size"), 16)
    config = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(FormRefused, match=r"no tokenizer that can be used: .*tokenizer\.json"):
        XgrammarCompiler(model(source=str(tmp_path)))
