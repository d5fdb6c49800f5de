"""Uniform numbers from (seed, position): a counter-based hash.

The number that samples a token depends on nothing else, so neither batch nor engine nor a move
between them changes a request's text. No torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: consecutive counters lie far apart
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the finalizer of SplitMix64


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Of each pair a multiple of 2**-24 in [0, 1), exact in float32; uint64 arrays of one shape."""
    keys = _mix(seeds) + positions * np.uint64(_GOLDEN)
    return (_mix(keys) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(_GOLDEN)
    values = (values ^ values >> np.uint64(30)) * np.uint64(_FIRST)
    values = (values ^ values >> np.uint64(27)) * np.uint64(_SECOND)
    return values ^ values >> np.uint64(31)
