"""`tokenizers` objects from the vocabulary in a GGUF file, and one of bytes for random weights."""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from dualpace.errors import ConfigError
from dualpace.graphs.detokenizer import byte_alphabet
from dualpace.graphs.gguf_file import GGUFFile
from dualpace.graphs.special_tokens import SpecialTokens

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

_ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}

# How text is cut before merging, by `tokenizer.ggml.pre`. The patterns are the models' own.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {"llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST, "qwen2": _WORDS + r"\p{N}" + _REST}


def backend_from_gguf(file: GGUFFile) -> tuple[Tokenizer, SpecialTokens]:
    """The tokenizer that a file carries; ConfigError for a kind that is not supported."""
    meta = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = meta.get("model")
    if kind == "gpt2":
        backend = _byte_level_bpe(meta)
    elif kind == "llama":
        backend = _sentencepiece_bpe(meta)
    elif kind is None:
        raise ConfigError(f"{file.path} has no tokenizer; it is not a complete model")
    else:
        raise ConfigError(f"GGUF tokenizer {kind} is not supported; DualPace reads gpt2 and llama")
    tokens, types = meta["tokens"], meta["token_type"]
    special = [i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)]
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in special]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    names = {f"{role}_token": tokens[meta[key]] for role, key in _ROLES.items() if key in meta}
    if meta.get("add_bos_token", kind == "llama" or meta.get("pre") == "llama-bpe"):
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, meta["bos_token_id"])],
        )
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{file.path} has a chat template that is no text; fetch it again")
    return backend, SpecialTokens(names, frozenset(special), template)


def _byte_level_bpe(meta: dict[str, Any]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(meta["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["merges"]]
    pre = meta.get("pre", "default")
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _PATTERNS)
    cut: pre_tokenizers.PreTokenizer | None = None
    if pre == "smollm":
        cut = pre_tokenizers.Digits(individual_digits=True)
    elif pre in _PATTERNS:
        cut = pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated")
    elif pre not in ("default", "gpt-2"):
        known = ", ".join(sorted([*_PATTERNS, "default", "gpt-2", "smollm"]))
        raise ConfigError(f"GGUF pre-tokenizer {pre} is not supported; DualPace reads {known}")
    steps = [cut, byte_level] if cut is not None else [byte_level]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(meta: dict[str, Any]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(meta["tokens"])}
    ranked = sorted(zip(meta["scores"], meta["tokens"], strict=True), key=lambda pair: -pair[0])
    merges = [
        (token[:cut], token[cut:])
        for _, token in ranked
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = meta["tokens"][meta.get("unknown_token_id", 0)]
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend("▁")] if meta.get("add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def byte_backend(vocab_size: int) -> Tokenizer:
    """A token a byte; ids past 255 are made-up words, so that random output reads as text."""
    vocab = {character: byte for character, byte in byte_alphabet().items() if byte < vocab_size}
    vocab |= {f"Ġt{index}": index for index in range(256, vocab_size)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend
