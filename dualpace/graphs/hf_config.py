"""ModelSpec of a Hugging Face folder: config.json and generation_config.json. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualpace.errors import ConfigError, unreadable
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
    if not isinstance(architectures, list):
        raise ConfigError(f"config.json has architectures={architectures!r}, where a list belongs")
    family = family_of(str(architectures[0]))
    for key, allowed in family.not_used.items():
        if key in config and config[key] is not None and config[key] not in allowed:
            raise ConfigError(
                f"{family.architecture} with {key}={config[key]!r} is not supported; "
                f"only {key}={allowed[0]!r} is"
            )
    hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    scaling, theta = _rope(config)
    context, vocab = _context(config), _need(config, "vocab_size")
    if scaling.kind == "dynamic":
        context = int(context * scaling.factor)
    _refuse_sliding_window(config, context)
    return ModelSpec(
        architecture=family.architecture,
        hidden=hidden,
        num_layers=_need(config, "num_hidden_layers"),
        num_q_heads=heads,
        num_kv_heads=_need(config, "num_key_value_heads", heads),
        head_dim=_need(config, "head_dim", hidden // heads),
        intermediate=_need(config, "intermediate_size"),
        vocab=vocab,
        max_context=context,
        rms_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        # One beyond the vocabulary can never come.
        eos_token_ids=tuple(
            token for token in dict.fromkeys(_ids(config.get("eos_token_id"))) if token < vocab
        ),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object; fetch the model again")
    return value


def _need(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or value < 1:
        said = f"no {key}" if value is None else f"{key}={value!r}"
        raise ConfigError(
            f"config.json has {said}, and supported models state a whole number from 1 on; fetch "
            f"the model again"
        )
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float):
        said = f"no {key}" if value is None else f"{key}={value!r}"
        raise ConfigError(f"config.json has {said}, where a number belongs; fetch the model again")
    return float(value)


def _context(config: Mapping[str, Any]) -> int:
    return _need(config, "max_position_embeddings", 2048)


def _ids(value: Any) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or token < 0:
            raise ConfigError(
                f"eos_token_id={value!r} in the model's folder holds {token!r}, which is no token "
                f"id; fetch the model again"
            )
    return ids


def _rope(config: Mapping[str, Any]) -> tuple[RopeScaling, float]:
    """(scaling, theta): `rope_parameters`, or the older `rope_scaling` and `rope_theta`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"config.json has {rope!r} for RoPE, where an object belongs")
    theta = _number(rope, "rope_theta", _number(config, "rope_theta", 10_000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    context = _context(config)
    if _number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("RoPE with partial_rotary_factor is not supported")
    if kind == "default":
        return RopeScaling(), theta
    if kind == "linear":
        return RopeScaling(kind=kind, factor=_number(rope, "factor")), theta
    if kind == "dynamic":
        return (
            RopeScaling(kind=kind, factor=_number(rope, "factor"), original_max_position=context),
            theta,
        )
    if kind == "llama3":
        original = _need(rope, "original_max_position_embeddings", context)
        return (
            RopeScaling(
                kind=kind,
                factor=_number(rope, "factor"),
                low_freq_factor=_number(rope, "low_freq_factor"),
                high_freq_factor=_number(rope, "high_freq_factor"),
                original_max_position=original,
            ),
            theta,
        )
    raise ConfigError(
        f"RoPE scaling {kind} is not supported; DualPace serves default, linear, dynamic, llama3"
    )


def _refuse_sliding_window(config: Mapping[str, Any], context: int) -> None:
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", window is not None)
    if isinstance(kinds := config.get("layer_types"), list):
        used = any(kind != "full_attention" for kind in kinds)
    elif _number(config, "max_window_layers", 0) >= _need(config, "num_hidden_layers"):
        used = False  # Qwen: only the layers from this one on slide
    if used and (not isinstance(window, int) or window < context):
        raise ConfigError(
            f"sliding-window attention (sliding_window={window}, context {context}) is not "
            "supported; choose a model with full attention"
        )
