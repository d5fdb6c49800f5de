"""Writing new K and V rows into paged blocks on the host.

Runs on the process's OpenMP pool, a few rows at a time a thread; writing the same rows again
changes nothing, so a repeated iteration is harmless. This file knows nothing about who owns the
blocks.
"""

import functools
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types
from torch import Tensor

from dualpace.cpu.openmp import parallel
from dualpace.cpu.plan import BLOCK_TOKENS
from dualpace.cpu.primitives import fetch_add, int64_at, uint16_at

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
    HALVES,  # 16-bit units of one head's row
    NUM_FIELDS,
) = range(14)

_ROWS_AT_ONCE = 8


def slots_of(block_tables: Tensor, positions: Tensor) -> Tensor:
    """int64 [B]: the slot (`block * 16 + offset`) of token `positions[i]` of row i, by
    block_tables [B, max_blocks].
    """
    blocks = block_tables.gather(1, (positions // BLOCK_TOKENS).long().unsqueeze(1)).squeeze(1)
    return blocks.long() * BLOCK_TOKENS + positions % BLOCK_TOKENS


def kv_append(k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Write row i of k and v at `slots[i]` of one layer's cache.

    k, v      [T, kv_heads, d], the cache's dtype; each row contiguous
    kv_cache  [blocks, 2, kv_heads, 16, d], block and head strides free; written in place
    slots     int64 [T], `block * 16 + offset`. Rows with one slot (padding rows in scratch block
              0) may mix.
    Raises ValueError for shapes or dtypes that do not fit, and for a slot outside the cache.
    """
    num_rows, heads, dim = k.shape
    if v.shape != k.shape or kv_cache.shape[1:] != (2, heads, BLOCK_TOKENS, dim):
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)} do not fit {tuple(kv_cache.shape)}"
        )
    if not k.dtype == v.dtype == kv_cache.dtype or k.element_size() not in (2, 4):
        raise ValueError(f"k, v and the cache must have one 16- or 32-bit dtype, not {k.dtype}")
    inner = (dim, 1)
    if k.stride()[1:] != inner or v.stride()[1:] != inner or kv_cache.stride()[3:] != inner:
        raise ValueError("the rows of k, v and of a KV block must be contiguous")
    if slots.shape != (num_rows,) or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int64 [{num_rows}]")
    if not num_rows:
        return
    low, high = slots.aminmax()
    if low < 0 or high >= kv_cache.shape[0] * BLOCK_TOKENS:
        raise ValueError(f"a slot lies outside the cache's {kv_cache.shape[0]} blocks")
    size = k.element_size()
    block = np.zeros(NUM_FIELDS, np.int64)
    block[NUM_ROWS], block[SLOTS], block[HEADS] = num_rows, slots.data_ptr(), heads
    block[KEY], block[KEY_STRIDE] = k.data_ptr(), k.stride(0) * size
    block[VALUE], block[VALUE_STRIDE] = v.data_ptr(), v.stride(0) * size
    block[CACHE], block[BLOCK_STRIDE] = kv_cache.data_ptr(), kv_cache.stride(0) * size
    block[CACHE_VALUE_STRIDE] = kv_cache.stride(1) * size
    block[HEAD_STRIDE], block[HALVES] = kv_cache.stride(2) * size, dim * size // 2
    threads = min(torch.get_num_threads(), -(-num_rows // _ROWS_AT_ONCE))
    parallel(append_kernel(), block.ctypes.data, threads)


@functools.cache
def append_kernel() -> int:
    """Address of the kernel `void f(int64 *block)`; one serves every shape and dtype."""

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        slots = carray(int64_at(a[SLOTS]), (a[NUM_ROWS],))
        n = a[HALVES]
        first = fetch_add(block + NEXT_ROW * 8, _ROWS_AT_ONCE)
        while first < a[NUM_ROWS]:
            for row in range(first, min(first + _ROWS_AT_ONCE, a[NUM_ROWS])):
                place = a[CACHE] + slots[row] // BLOCK_TOKENS * a[BLOCK_STRIDE]
                place += slots[row] % BLOCK_TOKENS * n * 2
                for h in range(a[HEADS]):
                    key = carray(uint16_at(a[KEY] + row * a[KEY_STRIDE] + h * n * 2), (n,))
                    value = carray(uint16_at(a[VALUE] + row * a[VALUE_STRIDE] + h * n * 2), (n,))
                    to = place + h * a[HEAD_STRIDE]
                    carray(uint16_at(to), (n,))[:] = key
                    carray(uint16_at(to + a[CACHE_VALUE_STRIDE]), (n,))[:] = value
            first = fetch_add(block + NEXT_ROW * 8, _ROWS_AT_ONCE)

    return int(cfunc(types.void(types.intp), cache=True)(kernel).address)
