"""Rotary position embedding: the table of cosines and sines of a model, and how it is applied."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualpace.graphs.spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Radians a position for each of the head_dim / 2 pairs, float32 [head_dim / 2]."""
    scaling = spec.rope_scaling
    base = 1.0 / spec.rope_theta ** _exponents(spec)
    if scaling.kind in ("default", "dynamic"):  # dynamic: up to the trained context
        return base
    if scaling.kind == "linear":
        return base / scaling.factor
    if scaling.kind == "factors":
        return base / torch.tensor(scaling.factors)
    assert scaling.kind == "llama3", scaling.kind
    # Long waves are stretched, short ones kept, those between blended.
    turns = scaling.original_max_position * base / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * base / scaling.factor + keep * base


def rope_table(spec: ModelSpec, num_positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of each position and pair, float32 [num_positions, head_dim / 2].

    Under dynamic scaling a token past the trained context is rotated as the last token of a
    sequence that ends there, so that its key depends on its position alone, however the prompt
    was batched, chunked or recomputed.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(spec)
    trained = spec.rope_scaling.original_max_position
    if spec.rope_scaling.kind == "dynamic" and num_positions > trained:
        lengths = positions[trained:, None] + 1
        stretch = spec.rope_scaling.factor * lengths / trained - (spec.rope_scaling.factor - 1)
        theta = spec.rope_theta * stretch ** (spec.head_dim / (spec.head_dim - 2))
        angles[trained:] = positions[trained:, None] / theta ** _exponents(spec)
    return angles.cos(), angles.sin()


def _exponents(spec: ModelSpec) -> Tensor:
    return torch.arange(0, spec.head_dim, 2).float() / spec.head_dim


def apply_rope(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate pair p, of elements p and p + D / 2, of every head by its angle. In float32."""
    cos, sin = cos_TP[:, None], sin_TP[:, None]
    first, second = x_THD.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_THD.dtype)
