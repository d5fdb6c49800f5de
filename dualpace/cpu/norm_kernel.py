# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""The kernel behind `norm_rows`: RMSNorm of bf16 rows, a row at a time a thread. It knows addresses
and strides, and nothing about tensors.
"""

import functools
import math
from typing import Any

import numpy as np
from numba import carray

from dualpace.cpu.callback import callback
from dualpace.cpu.gemm_kernel import tile_place
from dualpace.cpu.primitives import fetch_add, float_of_bits, int64_at, narrow, uint16_at, widen

# Fields of the argument block. Strides are in bytes.
(
    NEXT_ROW,  # atomic; the caller sets it to 0
    NUM_ROWS,
    WIDTH,
    INPUT,
    INPUT_STRIDE,
    WEIGHT,
    OUT,
    OUT_STRIDE,
    EPSILON_BITS,  # a float32 as an integer
    K_BLOCK,  # OUT gets tiles for gemm_kernel, by blocks of so many; 0: rows
    NUM_FIELDS,
) = range(11)


@functools.cache
def norm_kernel() -> int:
    """Address of the kernel `void f(int64 *block)`."""

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        width = a[WIDTH]
        weight = carray(uint16_at(a[WEIGHT]), (width,))
        tiled, row_tiles = a[K_BLOCK], (a[NUM_ROWS] + 15) // 16
        piece = 32 if tiled else width
        row = fetch_add(block + NEXT_ROW * 8, 1)
        while row < a[NUM_ROWS]:
            x = carray(uint16_at(a[INPUT] + row * a[INPUT_STRIDE]), (width,))
            total = np.float32(0.0)
            for i in range(width):
                value = widen(x[i])
                total += value * value
            mean = total / np.float32(width) + float_of_bits(np.uint32(a[EPSILON_BITS]))
            scale = np.float32(1.0) / np.float32(math.sqrt(mean))
            for first in range(0, width, piece):
                to = a[OUT] + row * a[OUT_STRIDE]
                if tiled:
                    place = tile_place(first // piece, row // 16, row_tiles, width // piece, tiled)
                    to = a[OUT] + place * 1024 + row % 16 * 64
                out = carray(uint16_at(to), (piece,))
                for i in range(piece):
                    # Rounded in between, as the stage's source is.
                    normal = widen(narrow(widen(x[first + i]) * scale))
                    out[i] = narrow(normal * widen(weight[first + i]))
            row = fetch_add(block + NEXT_ROW * 8, 1)

    fast = {"contract", "reassoc", "nsz"}
    return callback(kernel, fastmath=fast, error_model="numpy")
