"""Uniform numbers from (seed, position): a counter-based hash, in Python integers and in NumPy.

The number that samples a token depends on nothing else, so neither batch nor engine nor a move
between them changes a request's text. No torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: consecutive counters lie far apart
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the finalizer of SplitMix64


def uniform(seed: int, position: int) -> float:
    """A multiple of 2**-24 in [0, 1), exact in float32. Any integer seed; position >= 0."""
    return (_mix(_mix(seed & _MASK) + position * _GOLDEN & _MASK) >> 40) * 2.0**-24


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float32]:
    """`uniform` of each pair; uint64 arrays of one shape to float32."""
    keys = _mix_array(seeds) + positions * np.uint64(_GOLDEN)
    return (_mix_array(keys) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(value: int) -> int:
    value = value + _GOLDEN & _MASK
    value = (value ^ value >> 30) * _FIRST & _MASK
    value = (value ^ value >> 27) * _SECOND & _MASK
    return value ^ value >> 31


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(_GOLDEN)
    values = (values ^ values >> np.uint64(30)) * np.uint64(_FIRST)
    values = (values ^ values >> np.uint64(27)) * np.uint64(_SECOND)
    return values ^ values >> np.uint64(31)
