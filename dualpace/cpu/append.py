"""Writing new K and V rows into paged blocks on the host.

Runs on the process's OpenMP pool, a few rows at a time a thread; writing the same rows again
changes nothing, so a repeated iteration is harmless. This file knows nothing about who owns the
blocks.
"""

import numpy as np
import torch
from torch import Tensor

from dualpace.block import BLOCK_TOKENS
from dualpace.cpu import append_kernel as kernel
from dualpace.cpu.openmp import parallel


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
    if not k.dtype == v.dtype == kv_cache.dtype:
        raise ValueError(f"k, v and the cache must have one dtype, not {k.dtype}")
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
    block = np.array(
        [
            0,
            num_rows,
            slots.data_ptr(),
            k.data_ptr(),
            k.stride(0) * size,
            v.data_ptr(),
            v.stride(0) * size,
            heads,
            kv_cache.data_ptr(),
            kv_cache.stride(0) * size,
            kv_cache.stride(1) * size,
            kv_cache.stride(2) * size,
            dim * size,
        ],
        np.int64,
    )
    assert len(block) == kernel.NUM_FIELDS
    # One, or all: a pool that is asked for fewer threads than before ends the others.
    threads = 1 if num_rows <= kernel.ROWS_AT_ONCE else torch.get_num_threads()
    parallel(kernel.append_kernel(), block.ctypes.data, threads)
