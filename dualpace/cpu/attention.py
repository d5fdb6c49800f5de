"""Paged decode attention on the host: one query token a row against KV blocks of 16 tokens (paper
section 4).

`paged_decode` is the whole operation. A worker calls `plan_decode` once a round and a
`PagedDecoder` once a layer: the plan, the scratch and the argument block are then shared by all
layers and only three addresses change. This file knows nothing about models, pools or schedules.
"""

import math
import struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualpace.block import BLOCK_TOKENS
from dualpace.cpu import amx_probe, append_kernel
from dualpace.cpu import decode_kernel as kernel
from dualpace.cpu.append import kv_append
from dualpace.cpu.block_ir import BlockShape
from dualpace.cpu.isa import Isa, Level, detected, has_bf16
from dualpace.cpu.openmp import parallel
from dualpace.cpu.plan import DecodePlan, plan_decode
from dualpace.cpu.tile_block_ir import takes_tiles, tile_config

__all__ = ["PagedDecoder", "num_compiles", "paged_decode", "plan_decode", "warm_up"]

_LOG2E = math.log2(math.e)
_DTYPES = (torch.bfloat16, torch.float32)


def paged_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Attention of one new token a row over its paged context, into `out`.

    q             [B, q_heads, d], bfloat16 or float32
    kv_cache      [blocks, 2, kv_heads, 16, d], same dtype; rows of one head are contiguous, block
                  and head strides are free (`pool[:, layer]` of a block-major pool)
    block_tables  [B, max_blocks] int32: physical blocks of each row's context, in order
    context_lens  [B] int32, at least 1: tokens each row attends to, its own included
    scale         multiplies the scores (1 / sqrt(d) as a rule)
    out           like q; every element is written
    Raises ValueError for shapes, dtypes or lengths that do not fit together.
    """
    decoder = PagedDecoder(q.shape[1], kv_cache.shape[2], q.shape[2], q.dtype)
    plan = plan_decode(context_lens.numpy(), kv_cache.shape[2], torch.get_num_threads())
    decoder.begin(plan, block_tables)
    decoder.run(q, kv_cache, scale, out)


class PagedDecoder:
    """`paged_decode` for one model shape, with everything reusable kept: `begin` once a round,
    `run` once a layer.

    Not for use by two threads at once: a round's state lies in its argument block.
    """

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        shape: BlockShape | None = None,
    ):
        """Compiles or loads the kernel of `shape`; None: the best that this CPU has.

        Raises ValueError for a dtype other than bfloat16 and float32, a head size that is not a
        multiple of 16 up to 256, and more than 16 query heads a KV head.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"paged attention takes bfloat16 or float32, not {dtype}")
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"{num_q_heads} query heads do not divide among {num_kv_heads} KV heads"
            )
        self.num_q_heads, self.num_kv_heads = num_q_heads, num_kv_heads
        self.head_dim, self.dtype = head_dim, dtype
        group = num_q_heads // num_kv_heads
        self._shape = shape or block_shape(head_dim, group, dtype)
        # The compiler ends the process over an instruction that it has no encoding for.
        if self._shape.dot and self._shape.native and not has_bf16():
            raise ValueError("this CPU has no bf16 instructions, which the kernel was chosen for")
        if self._shape.tiles and self._shape.native and not amx_probe.request_permission():
            raise ValueError("the tile unit, which the kernel was chosen for, cannot be used here")
        self.function = kernel.decode_kernel(self._shape)
        self._block = np.zeros(kernel.NUM_FIELDS, np.int64)
        if self._shape.tiles:
            self._config = np.frombuffer(tile_config(self._shape), np.uint8).copy()
            self._block[kernel.CONFIG] = self._config.ctypes.data
        self._num_threads = 0
        self._scratch = self._partials = torch.empty(0)
        self._item_done = np.zeros(0, np.int64)
        self._plan: DecodePlan | None = None
        self._block_tables: Tensor | None = None

    def begin(self, plan: DecodePlan, block_tables: Tensor) -> None:
        """Take a round's plan and block tables ([B, max_blocks] int32); both are kept until the
        next round.
        """
        if plan.num_kv_heads != self.num_kv_heads:
            raise ValueError(
                f"the plan is for {plan.num_kv_heads} KV heads, not {self.num_kv_heads}"
            )
        wanted = -(-int(plan.context_lens.max()) // BLOCK_TOKENS)
        if (
            block_tables.dtype != torch.int32
            or block_tables.shape[0] != plan.num_rows
            or block_tables.shape[1] < wanted
            or block_tables.stride(1) != 1
        ):
            raise ValueError(
                f"block_tables must be int32 [{plan.num_rows}, at least {wanted}] "
                "with contiguous rows"
            )
        self._plan, self._block_tables, self._num_threads = plan, block_tables, plan.num_threads
        heads = plan.heads_per_item
        size = kernel.scratch_bytes(self._shape, heads)
        # In a chain of kernels all threads come by, whatever the plan has for them.
        threads = max(plan.num_threads, torch.get_num_threads())
        self._scratch = _at_least(self._scratch, threads * size // 4)
        self._partials = _at_least(
            self._partials, plan.num_slots * heads * self._shape.state_floats
        )
        if len(self._item_done) < len(plan.item_slots):
            self._item_done = np.zeros(len(plan.item_slots), np.int64)
        block = self._block
        block[kernel.NUM_CHUNKS] = plan.num_chunks
        block[kernel.CHUNK_STARTS] = plan.chunk_starts.ctypes.data
        block[kernel.SEGMENTS] = plan.segments.ctypes.data
        block[kernel.ITEM_SLOTS] = plan.item_slots.ctypes.data
        block[kernel.ITEM_DONE] = self._item_done.ctypes.data
        block[kernel.CONTEXT_LENS] = plan.context_lens.ctypes.data
        block[kernel.HEADS_PER_ITEM] = heads
        block[kernel.BLOCK_TABLES] = block_tables.data_ptr()
        block[kernel.TABLE_STRIDE] = block_tables.stride(0) * 4
        block[kernel.SCRATCH] = self._scratch.data_ptr()
        block[kernel.SCRATCH_STRIDE] = size
        block[kernel.PARTIALS] = self._partials.data_ptr()

    def run(self, q: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """One layer: as `paged_decode`, with the plan and the block tables of the current round."""
        block = self.fill(q, kv_cache, scale, out)
        block[kernel.NEXT_CHUNK] = block[kernel.NEXT_THREAD] = 0
        parallel(self.function, block.ctypes.data, self._num_threads)

    def fill(self, q: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> NDArray[np.int64]:
        """The argument block of `function` for what `run` would do; the next call replaces it."""
        self._check(q, kv_cache, out)
        block, size = self._block, q.element_size()
        block[kernel.QUERY] = q.data_ptr()
        block[kernel.QUERY_STRIDE] = q.stride(0) * size
        block[kernel.OUT] = out.data_ptr()
        block[kernel.OUT_STRIDE] = out.stride(0) * size
        block[kernel.CACHE] = kv_cache.data_ptr()
        block[kernel.BLOCK_STRIDE] = kv_cache.stride(0) * size
        block[kernel.VALUE_STRIDE] = kv_cache.stride(1) * size
        block[kernel.HEAD_STRIDE] = kv_cache.stride(2) * size
        (block[kernel.SCALE_BITS],) = struct.unpack("I", struct.pack("f", scale * _LOG2E))
        return block

    def _check(self, q: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        plan = self._plan
        if plan is None:
            raise ValueError("PagedDecoder.run before begin: the round has no plan yet")
        rows = (plan.num_rows, self.num_q_heads, self.head_dim)
        cache = (2, self.num_kv_heads, BLOCK_TOKENS, self.head_dim)
        for name, tensor in (("q", q), ("out", out)):
            if (
                tensor.shape != rows
                or tensor.dtype != self.dtype
                or tensor.stride()[1:] != (self.head_dim, 1)
            ):
                raise ValueError(f"{name} must be {self.dtype} {rows} with contiguous rows")
        if kv_cache.shape[1:] != cache or kv_cache.dtype != self.dtype:
            raise ValueError(
                f"kv_cache must be {self.dtype} [blocks, {', '.join(map(str, cache))}]"
            )
        if kv_cache.stride()[3:] != (self.head_dim, 1):
            raise ValueError("the 16 rows of a KV block and head must be contiguous")


def block_shape(
    head_dim: int, group: int, dtype: torch.dtype, level: Level | None = None
) -> BlockShape:
    """The specialisation for a head size, query heads a KV head, dtype and instruction level."""
    if head_dim % 16 or not 16 <= head_dim <= 256 or not 1 <= group <= 16:
        raise ValueError(
            f"paged attention takes head sizes that are multiples of 16 up to 256 and 1 to 16 "
            f"query heads a KV head, not size {head_dim} with {group}"
        )
    isa = detected() if level is None else Isa(level, "")
    bf16 = dtype == torch.bfloat16
    lanes = 16 if isa.has(Level.AVX512) else 8
    dot = bf16 and isa.has(Level.AVX512_BF16)
    tiles = bf16 and isa.has(Level.AMX) and takes_tiles(head_dim, group)
    return BlockShape(head_dim, group, lanes, bf16, dot, tiles=tiles)


def warm_up(num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Compile or load, and run once, all that decoding with a model of this shape calls."""
    cache = torch.zeros(1, 2, num_kv_heads, BLOCK_TOKENS, head_dim, dtype=dtype)
    row = torch.zeros(1, num_q_heads, head_dim, dtype=dtype)
    kv_append(
        row[:, :num_kv_heads], row[:, :num_kv_heads], cache, torch.zeros(1, dtype=torch.int64)
    )
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    paged_decode(row, cache, table, lens, 1.0, torch.empty_like(row))


def num_compiles() -> int:
    """Kernels that this process has compiled or loaded from disk so far; constant once warm."""
    return (
        kernel.decode_kernel.cache_info().misses + append_kernel.append_kernel.cache_info().misses
    )


def _at_least(tensor: Tensor, size: int) -> Tensor:
    return tensor if len(tensor) >= size else torch.empty(size)
