# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""The kernel behind `kv_append`. It knows addresses and strides, and nothing about tensors."""

import functools
from typing import Any

from numba import carray

from dualpace.block import BLOCK_TOKENS
from dualpace.cpu.callback import callback
from dualpace.cpu.primitives import copy_bytes, fetch_add, int64_at

# Fields of the argument block. Strides are in bytes.
(
    NEXT_ROW,  # atomic; the caller sets it to 0
    NUM_ROWS,
    SLOTS,
    KEY,
    KEY_STRIDE,
    VALUE,
    VALUE_STRIDE,
    HEADS,
    CACHE,
    BLOCK_STRIDE,
    CACHE_VALUE_STRIDE,
    HEAD_STRIDE,
    ROW_BYTES,  # of one head
    NUM_FIELDS,
) = range(14)

ROWS_AT_ONCE = 8


@functools.cache
def append_kernel() -> int:
    """Address of the kernel `void f(int64 *block)`; one serves every shape and dtype."""

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        slots = carray(int64_at(a[SLOTS]), (a[NUM_ROWS],))
        n = a[ROW_BYTES]
        first = fetch_add(block + NEXT_ROW * 8, ROWS_AT_ONCE)
        while first < a[NUM_ROWS]:
            for row in range(first, min(first + ROWS_AT_ONCE, a[NUM_ROWS])):
                place = a[CACHE] + slots[row] // BLOCK_TOKENS * a[BLOCK_STRIDE]
                place += slots[row] % BLOCK_TOKENS * n
                for h in range(a[HEADS]):
                    to = place + h * a[HEAD_STRIDE]
                    key = a[KEY] + row * a[KEY_STRIDE] + h * n
                    value = a[VALUE] + row * a[VALUE_STRIDE] + h * n
                    copy_bytes(to, key, n)
                    copy_bytes(to + a[CACHE_VALUE_STRIDE], value, n)
            first = fetch_add(block + NEXT_ROW * 8, ROWS_AT_ONCE)

    return callback(kernel)
