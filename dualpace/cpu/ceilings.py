# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""What the machine can do at most: read bandwidth, and the tile unit's rate from its registers.

Measured on the same threads as the kernels that are compared with it. Knows nothing about them.
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from dualpace.cpu import amx_ir, amx_probe
from dualpace.cpu.callback import callback
from dualpace.cpu.chain import Step
from dualpace.cpu.openmp import parallel
from dualpace.cpu.primitives import fetch_add, float32_at, int64_at

_PIECE = 1 << 18  # float32 that a thread reads at a time: 1 MiB
_TILE_STEPS = 40_000  # of four products each


def best_seconds(run: Callable[[], Any], repeats: int) -> float:
    """The shortest of `repeats` runs, after one that is not counted."""
    return min(in_turns({"": run}, repeats)[""])


def in_turns(
    runs: Mapping[str, Callable[[], Any]], repeats: int, calls: int = 1
) -> dict[str, list[float]]:
    """Seconds of `repeats` times `calls` calls of each, in turns, so that a machine that is shared
    or changes its clock treats all alike; one round before is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(repeats + 1):
        for name, run in runs.items():
            for _ in range(calls):
                elapsed = seconds(run)
                if round_number:
                    times[name].append(elapsed)
    return times


def beside(
    run: Callable[[], Any], ceiling: Callable[[], Any], turns: int
) -> list[tuple[float, float]]:
    """Seconds of `turns` runs, each with the mean of the ceiling's right before and after it: what
    a ceiling that wanders within a second still bounds. One run before is not counted.
    """
    run()
    before, pairs = seconds(ceiling), []
    for _ in range(turns):
        own, after = seconds(run), seconds(ceiling)
        pairs.append((own, (before + after) / 2))
        before = after
    return pairs


def seconds(run: Callable[[], Any]) -> float:
    """Of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Reader:
    """`run` reads `bytes` of a buffer, which was written before and exceeds the cache."""

    def __init__(self, buffer: Tensor, num_threads: int) -> None:
        size = buffer.numel() * buffer.element_size() // (4 * _PIECE)
        self.bytes, self._threads = size * _PIECE * 4, num_threads
        self._buffer, self._sums = buffer, np.zeros(1, np.float32)
        self._block = np.array([0, size, buffer.data_ptr(), self._sums.ctypes.data], np.int64)

    def run(self) -> None:
        self._block[0] = 0
        parallel(_reader(), self._block.ctypes.data, self._threads)

    def step(self) -> Step:
        """The same, in a chain."""
        return Step(_reader(), self._block, 1)


class TileSpinner:
    """`run` does `flops` on the tile unit without loading anything. Only where AMX works."""

    def __init__(self, num_threads: int) -> None:
        amx_probe.request_permission()
        self._threads = num_threads
        self.flops = num_threads * _TILE_STEPS * 4 * 2 * 16 * 16 * 32
        self._config = np.frombuffer(amx_probe.tile_config(), np.uint8).copy()
        self._block = np.array([0, self._config.ctypes.data], np.int64)

    def run(self) -> None:
        parallel(_tile_spinner(), self._block.ctypes.data, self._threads)


@functools.cache
def _reader() -> int:
    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (4,))
        piece = fetch_add(block, 1)
        while piece < a[1]:
            values = carray(float32_at(a[2] + piece * _PIECE * 4), (_PIECE,))
            total = np.float32(0.0)
            for i in range(_PIECE):
                total += values[i]
            if total == np.float32(-1.0):  # keeps the reads
                float32_at(a[3])[0] = total
            piece = fetch_add(block, 1)

    return callback(kernel, fastmath=True)


@intrinsic
def _spin_tiles(_context, config):
    def codegen(ctx, builder, _signature, args):
        amx_ir.configure(builder, builder.inttoptr(args[0], ir.PointerType()), True)
        tiles = amx_ir.Tiles(builder, True)
        for tile in range(8):
            tiles.zero(tile)
        with tiles.x.loop(_TILE_STEPS):
            for sums, left, right in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
                tiles.multiply(sums, left, right)
        amx_ir.release(builder, True)
        return ctx.get_dummy_value()

    return types.void(types.intp), codegen


@functools.cache
def _tile_spinner() -> int:
    def kernel(block: Any) -> None:
        # Each thread does the whole count: the rates of all are wanted, not a division of work.
        _spin_tiles(int64_at(block)[1])

    return callback(kernel)
