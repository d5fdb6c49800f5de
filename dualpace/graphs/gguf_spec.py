"""ModelSpec of a GGUF file's metadata. No torch."""

from __future__ import annotations

import reprlib
import struct
from typing import Any

from dualpace.errors import ConfigError
from dualpace.graphs.gguf_file import F32, GGUFFile
from dualpace.graphs.models import family_of_gguf
from dualpace.graphs.spec import ModelSpec, RopeScaling

_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """Read and check a file's metadata; ConfigError names whatever is not supported."""
    arch = str(file.metadata.get("general.architecture"))
    family = family_of_gguf(arch)
    facts = _Facts(file, arch)
    if (parts := facts.number("split.count", 1, of_model=False)) > 1:
        raise ConfigError(
            f"{file.path} is one of {parts:g} parts of a model: join them first, as with "
            f"llama-gguf-split --merge"
        )
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ConfigError(f"{file.path} has no token_embd.weight; it is not a complete model")
    vocab = table.shape[0]
    heads, hidden = facts.whole("attention.head_count"), facts.whole("embedding_length")
    head_dim = facts.whole("attention.key_length", hidden // heads)
    context = facts.whole("context_length")
    _refuse_options(arch, facts, head_dim, context)
    return ModelSpec(
        architecture=family.architecture,
        hidden=hidden,
        num_layers=facts.whole("block_count"),
        num_q_heads=heads,
        num_kv_heads=facts.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=facts.whole("feed_forward_length"),
        vocab=vocab,
        max_context=context,
        rms_eps=_short_float(facts.number("attention.layer_norm_rms_epsilon")),
        rope_theta=facts.number("rope.freq_base", 10_000.0),
        rope_scaling=_rope_scaling(file, facts, head_dim),
        tied="output.weight" not in file.tensors,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        # One beyond the vocabulary can never come.
        eos_token_ids=tuple(token for token in _end_ids(facts) if token < vocab),
    )


class _Facts:
    """Numbers in a file's metadata: of the model, under its architecture's name, or of the file.
    ConfigError for what is none, or is missing and has no default."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self._path, self._metadata, self._arch = file.path, file.metadata, arch

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        key, value = f"{self._arch}.{key}", self._value(f"{self._arch}.{key}", default)
        if not isinstance(value, int) or value < least:
            raise self._wrong(key, value, f"a whole number from {least} on")
        return value

    def number(self, key: str, default: float | None = None, of_model: bool = True) -> float:
        key = f"{self._arch}.{key}" if of_model else key
        value = self._value(key, default)
        if not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        return value

    def word(self, key: str, default: str) -> str:
        return str(self._metadata.get(f"{self._arch}.{key}", default))

    def token_id(self, key: str) -> int | None:
        value = self._metadata.get(key)
        if value is not None and (not isinstance(value, int) or value < 0):
            raise self._wrong(key, value, "a token id")
        return value

    def _value(self, key: str, default: float | None) -> Any:
        value = self._metadata.get(key, default)
        if value is None:
            raise ConfigError(f"{self._path} has no {key}; it is not a complete model")
        return value

    def _wrong(self, key: str, value: object, rule: str) -> ConfigError:
        said = reprlib.repr(value)  # of a list of many, the first few
        return ConfigError(f"{self._path} has {key}={said}, where {rule} belongs; fetch it again")


def _end_ids(facts: _Facts) -> list[int]:
    ids = [facts.token_id(f"tokenizer.ggml.{key}") for key in _END_IDS]
    return list(dict.fromkeys(token for token in ids if token is not None))


def _short_float(value: float) -> float:
    """The shortest decimal that a stored float32 stands for: 9.9999997e-06 -> 1e-05."""
    return float(f"{value:.6g}")


def _refuse_options(arch: str, facts: _Facts, head_dim: int, context: int) -> None:
    if facts.number("expert_count", 0) > 0:
        raise ConfigError(f"GGUF {arch} with expert_count (mixture of experts) is not supported")
    if facts.whole("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"GGUF {arch} with rope.dimension_count != head size is not supported")
    if facts.whole("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"GGUF {arch} with attention.value_length != key_length is not supported")
    window = facts.whole("attention.sliding_window", 0, least=0)
    if 0 < window < context:
        raise ConfigError(f"GGUF {arch} with attention.sliding_window={window} is not supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if facts.number(key, 0):
            raise ConfigError(f"GGUF {arch} with {key} is not supported")


def _rope_scaling(file: GGUFFile, facts: _Facts, head_dim: int) -> RopeScaling:
    if "rope_freqs.weight" in file.tensors:
        record = file.tensors["rope_freqs.weight"]
        layout = f"<{head_dim // 2}f"
        if record.shape != (head_dim // 2,) or record.ggml_type != F32:
            raise ConfigError(
                f"{file.path} has rope_freqs.weight of shape {list(record.shape)}, where "
                f"{head_dim // 2} float32 belong, one a frequency; fetch it again"
            )
        if record.offset + struct.calcsize(layout) > len(file.data):
            raise ConfigError(f"{file.path} is cut short; fetch it again")
        return RopeScaling(
            kind="factors", factors=struct.unpack_from(layout, file.data, record.offset)
        )
    kind = facts.word("rope.scaling.type", "none")
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind=kind, factor=facts.number("rope.scaling.factor"))
    raise ConfigError(
        f"RoPE scaling {kind} is not supported in GGUF files; DualPace serves none and linear"
    )
