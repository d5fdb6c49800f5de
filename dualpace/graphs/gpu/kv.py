"""KV blocks in motion: append, gather and scatter for swaps, direct write-out to host memory.

The HBM pool is one tensor [L, blocks, 2, K, 16, D], `pool[layer]` the layer's cache; the host pool
is block-major, [blocks, L, 2, K, 16, D], so that a block of all layers is one piece. Bytes are
moved as 32-bit words, so nothing here can change a value.

Shape suffixes: M rows, L layers, n blocks, K key/value heads, D head size.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# Kernels are typed by Triton, at their launch.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualpace.block import BLOCK_TOKENS

_WORDS = 4096  # of 4 bytes, a program
_LINK_PROGRAMS = 16  # enough for the link; the rest of the GPU belongs to the main batch
_RING_BLOCKS = 32  # device staging of a swap


def make_pool(
    num_layers: int, num_blocks: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str
) -> Tensor:
    """A zeroed HBM pool; padding rows and tails of V are multiplied by zero, so never NaN."""
    shape = (num_layers, num_blocks, 2, kv_heads, BLOCK_TOKENS, dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def as_words(tensor: Tensor) -> Tensor:
    """The same memory as int32."""
    return tensor.view(torch.int32)


def append(k_MKD: Tensor, v_MKD: Tensor, cache: Tensor, slots_M: Tensor) -> None:
    """k and v of each row go to its slot (block * 16 + offset, int64; -1 is nowhere)."""
    M, K, D = k_MKD.shape
    if not M:
        return
    assert k_MKD.stride()[1:] == v_MKD.stride()[1:] == (D, 1), "heads of a row lie together"
    _append[(M,)](
        k_MKD,
        v_MKD,
        cache,
        slots_M,
        k_MKD.stride(0),
        v_MKD.stride(0),
        cache.stride(0),
        K=K,
        D=D,
        BLOCK=triton.next_power_of_2(K * D),
    )


def gather(pool: Tensor, blocks_n: Tensor, staging: Tensor) -> None:
    """staging[i] = block blocks[i] of every layer. staging: [n, L, 2, K, 16, D]; blocks int32."""
    _move(pool, blocks_n, staging, None, to_pool=False)


def scatter(staging: Tensor, blocks_n: Tensor, pool: Tensor) -> None:
    """The inverse of `gather`."""
    _move(pool, blocks_n, staging, None, to_pool=True)


def gather_to_host(pool: Tensor, blocks_n: Tensor, host_pool: Tensor, targets_n: Tensor) -> None:
    """host_pool[targets[i]] = block blocks[i] of every layer, written over the link by few
    programs. host_pool is registered; targets int32, on the device."""
    _move(pool, blocks_n, host_pool, targets_n, to_pool=False)


def _move(
    pool: Tensor, blocks_n: Tensor, packed: Tensor, places_n: Tensor | None, to_pool: bool
) -> None:
    L, num_blocks = pool.shape[:2]
    words, packed = as_words(pool), as_words(packed)
    assert packed.is_contiguous()
    piece = words[0, 0].numel()
    chunks = triton.cdiv(piece, _WORDS)
    total = blocks_n.shape[0] * L * chunks
    _move_pieces[(total if places_n is None else min(total, _LINK_PROGRAMS),)](
        words,
        packed,
        blocks_n,
        blocks_n if places_n is None else places_n,
        L,
        num_blocks,
        piece,
        chunks,
        total,
        TO_POOL=to_pool,
        PLACED=places_n is not None,
        BLOCK=_WORDS,
    )


def write_out(
    k_TKD: Tensor,
    v_TKD: Tensor,
    host_pool: Tensor,
    layer: int,
    blocks_n: Tensor,
    programs: int = _LINK_PROGRAMS,
) -> None:
    """One layer's k and v of one whole prompt straight into its host blocks.

    host_pool: [blocks, L, 2, K, 16, D], registered (host_memory.py); blocks int32, on the device of
    k. Both may be some heads of larger tensors. Runs on the current stream with few programs, so
    that it can go beside a main batch. What follows the prompt's end in its last block is left
    alone.
    """
    T, K, D = k_TKD.shape
    assert k_TKD.stride() == v_TKD.stride() and k_TKD.stride()[1:] == (D, 1)
    k, v, host = as_words(k_TKD), as_words(v_TKD), as_words(host_pool)
    width = k.shape[-1]
    pieces = blocks_n.shape[0] * 2 * K
    _write_out[(min(programs, pieces),)](
        k,
        v,
        host,
        blocks_n,
        T,
        pieces,
        k.stride(0),
        host.stride(0),
        layer * host.stride(1),
        host.stride(2),
        K=K,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=8,
    )


class BlockMover:
    """Swaps between the pools: a gather or scatter of some blocks, and a DMA a run of blocks.

    All on the current stream, in which the caller orders it (a stream of its own) and records its
    events. The staging ring is reused within that stream, so only one stream may use a mover.
    """

    def __init__(
        self,
        pool: Tensor,
        host_pool: Tensor,
        ring_blocks: int = _RING_BLOCKS,
        chunk_blocks: int | None = None,
    ) -> None:
        """`chunk_blocks`: blocks of one registration of host memory; a DMA that reaches from one
        into the next is refused by the driver. None: all of them.
        """
        assert pool.shape[0] == host_pool.shape[1] and pool.shape[2:] == host_pool.shape[2:]
        self._pool, self._host = pool, host_pool
        self._chunk_blocks = chunk_blocks or host_pool.shape[0]
        shape = (ring_blocks, *host_pool.shape[1:])
        self._staging = torch.empty(shape, dtype=pool.dtype, device=pool.device)

    def swap_out(self, hbm_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies blocks from HBM to the host pool."""
        for sources, targets in self._pieces(hbm_blocks, host_blocks):
            gather(self._pool, self._to_device(sources), self._staging)
            for i, first, count in runs(targets, self._chunk_blocks):
                target = self._host[first : first + count]
                target.copy_(self._staging[i : i + count], non_blocking=True)

    def swap_out_by_kernel(self, hbm_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """The same by one kernel that writes host memory, on a few multiprocessors."""
        assert len(hbm_blocks) == len(host_blocks)
        ids = self._to_device([*hbm_blocks, *host_blocks])
        count = len(hbm_blocks)
        gather_to_host(self._pool, ids[:count], self._host, ids[count:])

    def swap_in(self, host_blocks: Sequence[int], hbm_blocks: Sequence[int]) -> None:
        """Copies blocks from the host pool to HBM."""
        for sources, targets in self._pieces(host_blocks, hbm_blocks):
            for i, first, count in runs(sources, self._chunk_blocks):
                source = self._host[first : first + count]
                self._staging[i : i + count].copy_(source, non_blocking=True)
            scatter(self._staging, self._to_device(targets), self._pool)

    def _pieces(
        self, sources: Sequence[int], targets: Sequence[int]
    ) -> list[tuple[Sequence[int], Sequence[int]]]:
        assert len(sources) == len(targets)
        step = self._staging.shape[0]
        starts = range(0, len(sources), step)
        return [(sources[i : i + step], targets[i : i + step]) for i in starts]

    def _to_device(self, blocks: Sequence[int]) -> Tensor:
        ids = torch.tensor(blocks, dtype=torch.int32)
        if self._pool.is_cuda:
            ids = ids.pin_memory()
        return ids.to(self._pool.device, non_blocking=True)


def runs(blocks: Sequence[int], chunk: int) -> list[tuple[int, int, int]]:
    """(place, first block, count) of each stretch of consecutive block ids within one chunk."""
    result: list[tuple[int, int, int]] = []
    for place, block in enumerate(blocks):
        if result and result[-1][1] + result[-1][2] == block and block % chunk:
            start, first, count = result[-1]
            result[-1] = (start, first, count + 1)
        else:
            result.append((place, block, 1))
    return result


@triton.jit
def _append(
    k,
    v,
    cache,
    slots,
    k_stride,
    v_stride,
    block_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        i = tl.arange(0, BLOCK)
        inside = i < K * D
        place = cache + (slot // 16) * block_stride + (i // D * 16 + slot % 16) * D + i % D
        tl.store(place, tl.load(k + row * k_stride + i, mask=inside), mask=inside)
        tl.store(place + K * 16 * D, tl.load(v + row * v_stride + i, mask=inside), mask=inside)


@triton.jit
def _move_pieces(
    pool,
    packed,
    blocks,
    places,
    L,
    num_blocks,
    piece,
    chunks,
    total,
    TO_POOL: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for chunk in range(tl.program_id(0), total, tl.num_programs(0)):
        i = chunk // (L * chunks)
        layer = chunk // chunks % L
        c = chunk % chunks * BLOCK + tl.arange(0, BLOCK)
        inside = c < piece
        block = tl.load(blocks + i).to(tl.int64)
        place = i.to(tl.int64)
        if PLACED:
            place = tl.load(places + i).to(tl.int64)
        in_pool = pool + (layer.to(tl.int64) * num_blocks + block) * piece + c
        in_packed = packed + (place * L + layer) * piece + c
        if TO_POOL:
            tl.store(in_pool, tl.load(in_packed, mask=inside), mask=inside)
        else:
            tl.store(in_packed, tl.load(in_pool, mask=inside), mask=inside)


@triton.jit
def _write_out(
    k,
    v,
    host,
    blocks,
    T,
    pieces,
    row_stride,
    block_stride,
    layer_offset,
    value_stride,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A piece is one head's 16 keys (or values) of one block: contiguous in host memory."""
    t, c = tl.arange(0, 16), tl.arange(0, PADDED)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        i = piece // (2 * K)
        head = piece % (2 * K)  # keys first, then values
        token = i * 16 + t
        mask = (token < T)[:, None] & (c < WIDTH)[None, :]
        source = k
        if head >= K:
            source = v
        place = source + token.to(tl.int64)[:, None] * row_stride + head % K * WIDTH + c[None, :]
        words = tl.load(place, mask=mask)
        block = tl.load(blocks + i).to(tl.int64)
        target = host + block * block_stride + layer_offset
        target += head // K * value_stride + head % K * 16 * WIDTH
        tl.store(target + t[:, None] * WIDTH + c[None, :], words, mask=mask)
