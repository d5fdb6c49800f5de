"""Text to ids and back: streaming in whole characters, every kind of tokenizer, chat templates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dualpace.errors import ConfigError
from dualpace.graphs.chat import ChatError, ChatTemplate
from dualpace.graphs.source import resolve_source
from dualpace.graphs.tokenizer import Tokenizer, load_tokenizer
from tests.graphs.reference import SIZES

TEXT = "Hello  wörld 日本語 😀👩‍👩‍👧 <|im_end|> naïve\n\tx = 1\u200d"


BYTES = load_tokenizer(resolve_source("random:tiny"))


@pytest.fixture
def bytes_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_source("random:tiny"))


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(1, 4), max_size=60))
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_text_and_never_split_a_character(text: str, cuts: list[int]) -> None:
    ids, stream, pieces, start = BYTES.encode(text), BYTES.detokenizer(), [], 0
    for cut in [*cuts, len(ids)]:
        pieces.append(stream.push(ids[start : start + cut]))
        start += cut
    pieces.append(stream.flush())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_streaming_equals_decoding_on_a_real_vocabulary(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode(TEXT)
    stream = smollm2_tokenizer.detokenizer()
    pieces = [stream.push([i]) for i in ids]
    assert "".join(pieces) + stream.flush() == smollm2_tokenizer.decode(ids)
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert "<|im_end|>" not in smollm2_tokenizer.decode(ids)


def test_an_unfinished_character_is_held_back_and_shown_at_the_end(
    bytes_tokenizer: Tokenizer,
) -> None:
    stream = bytes_tokenizer.detokenizer()
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.push([0x98]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push([0xFF, 65]) == "\ufffdA"


def test_streaming_costs_the_same_however_long_the_text(bytes_tokenizer: Tokenizer) -> None:
    calls = 0

    class Counting(dict[int, bytes]):
        def __contains__(self, key: object) -> bool:
            nonlocal calls
            calls += 1
            return super().__contains__(key)

    bytes_tokenizer._bytes = Counting(bytes_tokenizer._bytes)
    stream = bytes_tokenizer.detokenizer()
    for _ in range(5000):
        stream.push([97])
    assert calls == 5000


def test_ids_without_a_token_are_no_text(bytes_tokenizer: Tokenizer) -> None:
    assert bytes_tokenizer.decode([72, 105, 100_000]) == "Hi"


def save_folder(folder: Path, backend: Any, **config: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"architectures": ["LlamaForCausalLM"], **SIZES, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(model))
    return load_tokenizer(resolve_source(str(folder)))


def sentencepiece_like() -> Any:
    """A byte-fallback BPE as Llama 2 and Mistral have it."""
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)],
    )
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.train_from_iterator(["the cat sat on the mat and the hat"] * 3, trainer)
    raw = json.loads(backend.to_str())
    raw["added_tokens"] = raw["added_tokens"][:3]  # bytes are ordinary tokens
    backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def test_sentencepiece_folder(tmp_path: Path) -> None:
    backend = sentencepiece_like()
    tokenizer = save_folder(tmp_path, backend, eos_token={"content": "</s>"}, bos_token="<s>")
    for text in ("the cat 日本 😀", " the  hat", "x"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == backend.decode(ids)
    prompt, answer = tokenizer.encode("the cat"), tokenizer.encode("the hat")
    stream = tokenizer.detokenizer()
    streamed = "".join(stream.push([i]) for i in answer)
    assert tokenizer.decode(prompt) + streamed == "the cat the hat"  # a space, not a mark
    assert tokenizer.eos_ids == (1, 2)  # the model's, then the tokenizer's


def test_byte_level_folder_equals_the_reference(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    backend.add_tokens([tokenizers.AddedToken("<call me>", special=False, normalized=False)])
    tokenizer = save_folder(tmp_path, backend, eos_token="<end>")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<end>"
    )
    for text in (TEXT, "<call me> maybe<end>"):
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_other_decoders_are_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        save_folder(tmp_path, backend)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(resolve_source(str(tmp_path)))


def test_chat_template_of_a_folder(tmp_path: Path) -> None:
    backend = sentencepiece_like()
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    named = [{"name": "default", "template": template}, {"name": "tools", "template": "no"}]
    tokenizer = save_folder(tmp_path, backend, bos_token="<s>", chat_template=named)
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "<s>hi"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert load_tokenizer(resolve_source(str(tmp_path))).chat([]) == "newer"


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("tokenizer.json", b"{", "tokenizer.json is no tokenizer (EOF while parsing"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja has a chat template that is no text"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{}]}',
            "has a chat template that is no text",
        ),
        ("tokenizer_config.json", b'{"chat_template": 5}', "a chat template that is no text"),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_named(
    file: str, text: bytes, sentence: str, tmp_path: Path
) -> None:
    save_folder(tmp_path, sentencepiece_like())
    (tmp_path / file).write_bytes(text)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_tokenizer(resolve_source(str(tmp_path)))


def test_templates_get_what_they_expect() -> None:
    template = ChatTemplate(
        "{%- for m in messages %}\n    {%- if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "{{ m.content }};{% endfor %}{{ tools | tojson }}{% if add_generation_prompt %}>{% endif %}"
        "{{ strftime_now('%Y') | length }}{% if thinks is defined %}{{ thinks }}{% endif %}",
        {},
    )
    messages = [{"role": "user", "content": "é"}, {"role": "tool", "content": "x"}]
    assert template.render(messages, [{"a": "é"}]) == 'é;[{"a": "é"}]>4'
    assert template.render(messages, None, False, {"thinks": False}) == "é;null4False"


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / (messages | length - 1) }}",
        "{% if %}",
    ],
)
def test_templates_cannot_escape_and_refuse_in_a_sentence(text: str) -> None:
    with pytest.raises(ChatError):
        ChatTemplate(text, {}).render([{"role": "user", "content": "x"}])


def test_a_model_without_template_says_so(bytes_tokenizer: Tokenizer) -> None:
    assert not bytes_tokenizer.has_chat_template
    with pytest.raises(ChatError, match="no chat template"):
        bytes_tokenizer.chat([{"role": "user", "content": "x"}])
