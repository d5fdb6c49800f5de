"""ModelSpec of a Hugging Face folder: config.json and generation_config.json. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualpace.errors import ConfigError
from dualpace.graphs.models import family_of
from dualpace.graphs.spec import ModelSpec, RopeScaling


def spec_from_folder(folder: Path) -> ModelSpec:
    """Read and check `folder`/config.json; ConfigError names whatever is not supported."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.source={folder} has no config.json; give a Hugging Face folder")
    config = read_json(path)
    generation = folder / "generation_config.json"
    if generation.is_file():
        # Chat models end a turn with ids that only the generation config lists.
        eos = read_json(generation).get("eos_token_id")
        config["eos_token_id"] = [*_ids(config.get("eos_token_id")), *_ids(eos)]
    return spec_from_config(config)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of the contents of a config.json."""
    architectures = config.get("architectures") or ["(none given in config.json)"]
    family = family_of(architectures[0])
    for key, allowed in family.not_used.items():
        if key in config and config[key] is not None and config[key] not in allowed:
            raise ConfigError(
                f"{family.architecture} with {key}={config[key]!r} is not supported; "
                f"only {key}={allowed[0]!r} is"
            )
    hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    scaling, theta = _rope(config)
    context = int(config.get("max_position_embeddings", 2048))
    if scaling.kind == "dynamic":
        context = int(context * scaling.factor)
    _refuse_sliding_window(config, context)
    return ModelSpec(
        architecture=family.architecture,
        hidden=hidden,
        num_layers=_need(config, "num_hidden_layers"),
        num_q_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=_need(config, "intermediate_size"),
        vocab=_need(config, "vocab_size"),
        max_context=context,
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        eos_token_ids=tuple(dict.fromkeys(_ids(config.get("eos_token_id")))),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object; fetch the model again")
    return value


def _need(config: Mapping[str, Any], key: str) -> int:
    if not isinstance(config.get(key), int):
        raise ConfigError(f"config.json has no integer {key}, which every supported model states")
    return int(config[key])


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _rope(config: Mapping[str, Any]) -> tuple[RopeScaling, float]:
    """(scaling, theta): `rope_parameters`, or the older `rope_scaling` and `rope_theta`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    context = int(config.get("max_position_embeddings", 2048))
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("RoPE with partial_rotary_factor is not supported")
    if kind == "default":
        return RopeScaling(), theta
    if kind == "linear":
        return RopeScaling(kind=kind, factor=float(rope["factor"])), theta
    if kind == "dynamic":
        return (
            RopeScaling(kind=kind, factor=float(rope["factor"]), original_max_position=context),
            theta,
        )
    if kind == "llama3":
        original = rope.get("original_max_position_embeddings") or context
        return (
            RopeScaling(
                kind=kind,
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position=int(original),
            ),
            theta,
        )
    raise ConfigError(
        f"RoPE scaling {kind} is not supported; DualPace serves default, linear, dynamic, llama3"
    )


def _refuse_sliding_window(config: Mapping[str, Any], context: int) -> None:
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", window is not None)
    if "layer_types" in config and config["layer_types"] is not None:
        used = any(kind != "full_attention" for kind in config["layer_types"])
    elif config.get("max_window_layers", 0) >= config["num_hidden_layers"]:
        used = False  # Qwen: only the layers from this one on slide
    if used and (window is None or window < context):
        raise ConfigError(
            f"sliding-window attention (sliding_window={window}, context {context}) is not "
            "supported; choose a model with full attention"
        )
