# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""What the machine can do at most: read bandwidth, and the tile unit's rate from its registers.

Measured on the same threads as the kernels that are compared with it. Knows nothing about them.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic
from torch import Tensor

from dualpace.cpu import amx_ir, amx_probe
from dualpace.cpu.openmp import parallel
from dualpace.cpu.primitives import fetch_add, float32_at, int64_at

_PIECE = 1 << 18  # float32 that a thread reads at a time: 1 MiB
_TILE_STEPS = 200_000


def best_seconds(run: Callable[[], Any], repeats: int) -> float:
    """The shortest of `repeats` runs, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth(buffer: Tensor, num_threads: int, repeats: int = 5) -> float:
    """Bytes a second that `num_threads` read from `buffer`: written before, and above the cache."""
    size = buffer.numel() * buffer.element_size() // (4 * _PIECE)
    sums = np.zeros(1, np.float32)
    block = np.array([0, size, buffer.data_ptr(), sums.ctypes.data], np.int64)

    def run() -> None:
        block[0] = 0
        parallel(_reader(), block.ctypes.data, num_threads)

    return size * _PIECE * 4 / best_seconds(run, repeats)


def tile_rate(num_threads: int, repeats: int = 5) -> float:
    """FLOP/s of the tile unit when nothing is loaded. Only where AMX works."""
    amx_probe.request_permission()
    config = np.frombuffer(amx_probe.tile_config(), np.uint8).copy()
    block = np.array([0, config.ctypes.data], np.int64)

    def run() -> None:
        block[0] = 0
        parallel(_tile_spinner(), block.ctypes.data, num_threads)

    products = num_threads * _TILE_STEPS * 4
    return products * 2 * 16 * 16 * 32 / best_seconds(run, repeats)


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

    signature = types.void(types.intp)
    return int(cfunc(signature, cache=True, fastmath=True)(kernel).address)


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
        fetch_add(block, 1)
        _spin_tiles(int64_at(block)[1])

    return int(cfunc(types.void(types.intp), cache=True)(kernel).address)
