"""Swaps of some heads between pools that are divided differently among ranks.

A head's piece of a block is a few KiB, too small for a DMA of its own: a kernel of few programs
reads and writes registered host memory directly. Layouts as in kv.py.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# Kernels are typed by Triton, at their launch.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualpace.graphs.gpu.kv import as_words

_PROGRAMS = 16  # enough for the link


class HeadMover:
    """`kv.BlockMover` for the heads that both views have: `pool` [L, blocks, 2, K, 16, D] on the
    device, `host_pool` [blocks, L, 2, K, 16, D] registered. All on the current stream.
    """

    def __init__(self, pool: Tensor, host_pool: Tensor) -> None:
        assert pool.shape[0] == host_pool.shape[1] and pool.shape[2:] == host_pool.shape[2:]
        dim = pool.shape[-1]
        for view in (pool, host_pool):
            assert view.stride()[3:] == (16 * dim, dim, 1), "a head of a block is one piece"
        self._pool, self._host = as_words(pool), as_words(host_pool)

    def swap_out(self, hbm_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies blocks from HBM to the host pool."""
        self._move(hbm_blocks, host_blocks, to_host=True)

    def swap_in(self, host_blocks: Sequence[int], hbm_blocks: Sequence[int]) -> None:
        """Copies blocks from the host pool to HBM."""
        self._move(hbm_blocks, host_blocks, to_host=False)

    def _move(self, hbm_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> None:
        count = len(hbm_blocks)
        assert count == len(host_blocks)
        pool, host = self._pool, self._host
        ids = torch.tensor([*hbm_blocks, *host_blocks], dtype=torch.int32)
        if pool.is_cuda:
            ids = ids.pin_memory()
        ids = ids.to(pool.device, non_blocking=True)
        layers, heads = pool.shape[0], pool.shape[3]
        pieces = count * layers * 2 * heads
        _move_heads[(min(pieces, _PROGRAMS),)](
            pool,
            host,
            ids,
            count,
            layers,
            pieces,
            *pool.stride()[:3],
            *host.stride()[:3],
            HEADS=heads,
            PIECE=pool.stride(3),
            PADDED=triton.next_power_of_2(pool.stride(3)),
            TO_HOST=to_host,
        )


@triton.jit(do_not_specialize=["count", "pieces"])  # or some counts would compile while serving
def _move_heads(
    pool,
    host,
    ids,
    count,
    layers,
    pieces,
    pool_layer,
    pool_block,
    pool_value,
    host_block,
    host_layer,
    host_value,
    HEADS: tl.constexpr,
    PIECE: tl.constexpr,
    PADDED: tl.constexpr,
    TO_HOST: tl.constexpr,
):
    c = tl.arange(0, PADDED)
    inside = c < PIECE
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        head = piece % HEADS
        value = piece // HEADS % 2  # keys first
        layer = (piece // (2 * HEADS) % layers).to(tl.int64)
        i = piece // (2 * HEADS * layers)
        here = tl.load(ids + i).to(tl.int64)
        there = tl.load(ids + count + i).to(tl.int64)
        in_pool = pool + layer * pool_layer + here * pool_block
        in_pool += value * pool_value + head * PIECE + c
        in_host = host + there * host_block + layer * host_layer
        in_host += value * host_value + head * PIECE + c
        if TO_HOST:
            tl.store(in_host, tl.load(in_pool, mask=inside), mask=inside)
        else:
            tl.store(in_pool, tl.load(in_host, mask=inside), mask=inside)
