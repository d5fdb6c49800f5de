"""What a decoder-only model is made of: sizes, RoPE, special ids. Plain data.

Knows nothing about files (hf_config.py and gguf_spec.py read them) and imports no torch, so that a
plan can be resolved in milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies depart from `theta ** (-2i / head_dim)`.

    kind: default | linear | dynamic | llama3 | factors. `factors` (one divisor a frequency) is how
    GGUF files store llama3 scaling.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0  # tokens; dynamic and llama3
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A Llama-like decoder: pre-norm, GQA, RoPE, gated SiLU MLP."""

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
        scaling = dict(fields.get("rope_scaling", {}))
        scaling["factors"] = tuple(scaling.get("factors", ()))
        eos = tuple(fields.get("eos_token_ids", ()))
        return cls(**{**fields, "rope_scaling": RopeScaling(**scaling), "eos_token_ids": eos})
