"""How the attention of one decode batch is divided among threads: pure integer work, shared by
all layers.

All KV blocks of the batch, over all heads, lie on one line. The line is cut into chunks, equal but
for the last ones of a small batch, whatever requests they fall in, so that every thread reads the
same number of tokens. A request cut by a chunk border has several segments; each leaves a partial
result in a slot of its own, and whoever finishes last merges them. This file knows nothing about
tensors, threads or kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dualpace.block import BLOCK_TOKENS

_MIN_CHUNK_BLOCKS = 8  # a shorter chunk costs more in merging than it gives in balance

# Columns of a segment.
ROW, HEAD, BEGIN, END, SLOT, ITEM = range(6)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The division of one batch.

    num_rows, num_kv_heads   what it was made for
    num_threads              threads to start: one, or all, since a pool that is asked for fewer
                             threads than before ends the others
    heads_per_item           KV heads that one segment walks together
    segments                 int32 [segments, 6]: row, first KV head, first and end KV block, slot
                             (-1: the whole item), item; sorted by place on the line
    chunk_starts             int32 [chunks + 1]: segments of chunk c are
                             `chunk_starts[c]:chunk_starts[c + 1]`
    item_slots               int32 [items, 2]: first slot and number of slots of an item (0 when
                             it is not cut)
    num_slots                partial results that need room
    context_lens             int32 [rows], tokens
    """

    num_rows: int
    num_kv_heads: int
    num_threads: int
    heads_per_item: int
    segments: NDArray[np.int32]
    chunk_starts: NDArray[np.int32]
    item_slots: NDArray[np.int32]
    num_slots: int
    context_lens: NDArray[np.int32]

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_starts) - 1

    def chunk_blocks(self) -> NDArray[np.int64]:
        """KV blocks (of `heads_per_item` heads) in each chunk."""
        lengths = (self.segments[:, END] - self.segments[:, BEGIN]).astype(np.int64)
        return np.add.reduceat(lengths, self.chunk_starts[:-1])


def plan_decode(
    context_lens: Sequence[int] | NDArray[np.integer],
    num_kv_heads: int,
    num_threads: int,
    chunks_per_thread: int = 16,
    heads_per_item: int = 1,
) -> DecodePlan:
    """Divide a decode batch whose rows attend to `context_lens` tokens each (at least 1) among
    `num_threads`.

    `chunks_per_thread` above 1 lets a thread that is held up leave work to the others; the defaults
    of both were measured fastest.
    Raises ValueError for an empty batch, a row without tokens, or sizes below 1.
    """
    lens = np.ascontiguousarray(context_lens, np.int32)
    if lens.ndim != 1 or not len(lens) or lens.min() < 1:
        raise ValueError("a decode batch needs at least one row, and every row at least one token")
    row_blocks = -(-lens.astype(np.int64) // BLOCK_TOKENS)
    if min(num_kv_heads, num_threads, chunks_per_thread, heads_per_item) < 1:
        raise ValueError("heads, threads, chunks and heads per item must be at least 1")
    if num_kv_heads % heads_per_item:
        raise ValueError(f"{heads_per_item} heads an item do not divide {num_kv_heads} KV heads")
    groups = num_kv_heads // heads_per_item
    item_blocks = np.repeat(row_blocks, groups)
    ends = np.cumsum(item_blocks)
    starts = ends - item_blocks
    bounds = _chunk_bounds(starts, int(ends[-1]), num_threads, chunks_per_thread)

    cuts = np.union1d(starts, bounds)
    begin, end = cuts, np.append(cuts[1:], ends[-1])
    item = np.searchsorted(ends, begin, side="right")
    cut = (end - begin) != item_blocks[item]
    slot = np.where(cut, np.cumsum(cut) - 1, -1)
    segments = np.empty((len(cuts), 6), np.int32)
    segments[:, ROW] = item // groups
    segments[:, HEAD] = item % groups * heads_per_item
    segments[:, BEGIN] = begin - starts[item]
    segments[:, END] = end - starts[item]
    segments[:, SLOT] = slot
    segments[:, ITEM] = item

    counts = np.bincount(item[cut], minlength=len(item_blocks))
    item_slots = np.stack([np.cumsum(counts) - counts, counts], axis=1).astype(np.int32)
    chunk_starts = np.append(np.searchsorted(cuts, bounds), len(cuts)).astype(np.int32)
    return DecodePlan(
        len(lens),
        num_kv_heads,
        num_threads if len(bounds) > 1 else 1,
        heads_per_item,
        segments,
        chunk_starts,
        item_slots,
        int(cut.sum()),
        lens,
    )


def _chunk_bounds(
    starts: NDArray[np.int64], total: int, threads: int, chunks_per_thread: int
) -> NDArray[np.int64]:
    """Where chunks begin on a line of `total` blocks: at a near item start rather than just beside
    it.

    Evenly where chunks are long. Of few blocks the first are divided into longer chunks, mostly
    whole items, and only the last, which make threads end together, into the shortest.
    """
    short, wanted = _MIN_CHUNK_BLOCKS, threads * chunks_per_thread
    if threads == 1:
        return np.zeros(1, np.int64)
    if total >= 2 * short * wanted:
        return _snapped(_evenly(total, wanted), starts, min(total // wanted // 32, short))
    last = 2 * short * threads
    if total < last + 2 * short:
        last = total
    first = _evenly(total - last, -(-(total - last) // (2 * short)))
    shortest = _evenly(last, min(wanted, max(1, last // short))) + total - last
    return np.union1d(_snapped(first, starts, short // 2), shortest)


def _evenly(total: int, count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) * total // max(1, count)


def _snapped(
    bounds: NDArray[np.int64], starts: NDArray[np.int64], tolerance: int
) -> NDArray[np.int64]:
    """Bounds, the first of which stays, at item starts that are no further off than `tolerance`."""
    if not len(bounds):
        return bounds
    after = np.minimum(np.searchsorted(starts, bounds), len(starts) - 1)
    nearest = np.where(
        np.abs(starts[after] - bounds) < np.abs(bounds - starts[after - 1]),
        starts[after],
        starts[np.maximum(after - 1, 0)],
    )
    bounds = np.where(np.abs(nearest - bounds) <= tolerance, nearest, bounds)
    bounds[0] = 0
    return np.unique(bounds)
