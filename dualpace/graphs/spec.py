"""What a decoder-only model is made of: sizes, RoPE, special ids. Plain data.

Knows nothing about files (hf_config.py and gguf_spec.py read them) and imports no torch, so that a
plan can be resolved in milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from dataclasses import dataclass
from typing import Any

from dualpace.errors import ConfigError

# What is counted, by the words that people know it by.
_SIZES = {
    "hidden": "hidden size",
    "num_layers": "number of layers",
    "num_q_heads": "number of query heads",
    "num_kv_heads": "number of KV heads",
    "head_dim": "head size",
    "intermediate": "intermediate size",
    "vocab": "vocabulary",
    "max_context": "context",
}
_LARGEST = 2**31 - 1
_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "factors")


def _check_positive(words: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _wrong(words, value, "a number above 0")


def _wrong(words: str, value: object, rule: str) -> ConfigError:
    return ConfigError(
        f"the model's {words} is {value!r} and must be {rule}: its files are damaged, or of "
        f"another kind; fetch it again"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies depart from `theta ** (-2i / head_dim)`.

    kind: default | linear | dynamic | llama3 | factors. `factors` (one divisor a frequency) is how
    GGUF files store llama3 scaling. ConfigError for what is no number above 0.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0  # tokens; dynamic and llama3
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _ROPE_KINDS:
            raise _wrong("RoPE scaling", self.kind, f"one of {', '.join(_ROPE_KINDS)}")
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _check_positive(f"RoPE {name}", getattr(self, name))
        for factor in self.factors:
            _check_positive("RoPE factors", factor)
        if self.low_freq_factor >= self.high_freq_factor:
            raise _wrong("RoPE high_freq_factor", self.high_freq_factor, "above low_freq_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A Llama-like decoder: pre-norm, GQA, RoPE, gated SiLU MLP. ConfigError for sizes that no
    model has: they come from files."""

    architecture: str  # the Hugging Face name, a key of models.MODELS
    hidden: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int  # tokens
    rms_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    tied: bool = False  # the LM head is the embedding table
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head before RoPE
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, words in _SIZES.items():
            size = getattr(self, name)
            if not isinstance(size, int) or not 1 <= size <= _LARGEST:
                raise _wrong(words, size, f"a whole number from 1 to {_LARGEST}")
        if self.num_q_heads % self.num_kv_heads:
            what = f"a divisor of its {self.num_q_heads} query heads"
            raise _wrong(_SIZES["num_kv_heads"], self.num_kv_heads, what)
        if self.head_dim % 2:
            raise _wrong(_SIZES["head_dim"], self.head_dim, "even, as rotary positions turn pairs")
        pairs, factors = self.head_dim // 2, len(self.rope_scaling.factors)
        if self.rope_scaling.kind == "factors" and factors != pairs:
            raise _wrong("number of RoPE factors", factors, f"{pairs}, one a frequency")
        _check_positive("rms_eps", self.rms_eps)
        _check_positive("rope_theta", self.rope_theta)

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or all value heads)."""
        return self.num_kv_heads * self.head_dim

    def num_parameters(self) -> int:
        """Stored weights; a tied head counts once."""
        attention = self.hidden * (2 * self.q_size + 2 * self.kv_size)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.num_layers * layer + tables + self.hidden

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelSpec:
        """Inverse of `dataclasses.asdict`, lists in place of tuples allowed."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in fields.keys() - known.keys():
            raise ConfigError(f"a shape has no {name}: it has {', '.join(known)}")
        for name, field in known.items():
            if name not in fields and field.default is dataclasses.MISSING:
                raise ConfigError(f"the shape has no {name}, which every model has")
        try:
            scaling = dict(fields.get("rope_scaling", {}))
            scaling["factors"] = tuple(scaling.get("factors", ()))
            rope = RopeScaling(**scaling)
            eos = tuple(map(operator.index, fields.get("eos_token_ids", ())))
        except TypeError as error:
            raise ConfigError(
                f"the shape's rope_scaling or eos_token_ids cannot be read ({error}): the first is "
                f"an object, the second a list of token ids"
            ) from error
        return cls(**{**fields, "rope_scaling": rope, "eos_token_ids": eos})
