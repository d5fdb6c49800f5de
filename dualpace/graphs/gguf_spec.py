"""ModelSpec of a GGUF file's metadata. No torch."""

from __future__ import annotations

import struct
from typing import Any

from dualpace.errors import ConfigError
from dualpace.graphs.gguf_file import GGUFFile
from dualpace.graphs.models import family_of_gguf
from dualpace.graphs.spec import ModelSpec, RopeScaling

_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """Read and check a file's metadata; ConfigError names whatever is not supported."""
    meta = file.metadata
    arch = str(meta.get("general.architecture"))
    family = family_of_gguf(arch)

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise ConfigError(f"{file.path} has no {arch}.{key}; it is not a complete model")
        return value

    if (parts := meta.get("split.count", 1)) > 1:
        raise ConfigError(
            f"{file.path} is one of {parts} parts of a model: join them first, as with "
            f"llama-gguf-split --merge"
        )
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} has no token_embd.weight; it is not a complete model")
    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    _refuse_options(arch, meta, head_dim)
    return ModelSpec(
        architecture=family.architecture,
        hidden=hidden,
        num_layers=get("block_count"),
        num_q_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=get("feed_forward_length"),
        vocab=file.tensors["token_embd.weight"].shape[0],
        max_context=get("context_length"),
        rms_eps=_short_float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=get("rope.freq_base", 10_000.0),
        rope_scaling=_rope_scaling(file, arch),
        tied="output.weight" not in file.tensors,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        eos_token_ids=tuple(
            dict.fromkeys(
                meta[f"tokenizer.ggml.{key}"] for key in _END_IDS if f"tokenizer.ggml.{key}" in meta
            )
        ),
    )


def _short_float(value: float) -> float:
    """The shortest decimal that a stored float32 stands for: 9.9999997e-06 -> 1e-05."""
    return float(f"{value:.6g}")


def _refuse_options(arch: str, meta: dict[str, Any], head_dim: int) -> None:
    if meta.get(f"{arch}.expert_count", 0) > 0:
        raise ConfigError(f"GGUF {arch} with expert_count (mixture of experts) is not supported")
    if meta.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"GGUF {arch} with rope.dimension_count != head size is not supported")
    if meta.get(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"GGUF {arch} with attention.value_length != key_length is not supported")
    window = meta.get(f"{arch}.attention.sliding_window", 0)
    if 0 < window < meta[f"{arch}.context_length"]:
        raise ConfigError(f"GGUF {arch} with attention.sliding_window={window} is not supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if meta.get(f"{arch}.{key}", 0):
            raise ConfigError(f"GGUF {arch} with {key} is not supported")


def _rope_scaling(file: GGUFFile, arch: str) -> RopeScaling:
    if "rope_freqs.weight" in file.tensors:
        record = file.tensors["rope_freqs.weight"]
        layout = f"<{record.shape[0]}f"
        return RopeScaling(
            kind="factors", factors=struct.unpack_from(layout, file.data, record.offset)
        )
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind=kind, factor=file.metadata[f"{arch}.rope.scaling.factor"])
    raise ConfigError(
        f"RoPE scaling {kind} is not supported in GGUF files; DualPace serves none and linear"
    )
