"""Messages as the engine would send them, for batches that nobody asked for. Blocks are taken in a
scattered order, as a pool in use would give them. No torch."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from dualpace.block import BLOCK_TOKENS
from dualpace.runtime import messages as m
from dualpace.runtime.routing import ROUTES, Route
from dualpace.runtime.types import RowKind, TransferKind
from dualpace.runtime.wire import I32


class BatchMaker:
    """`num_gpu_blocks` and `num_host_blocks` are physical: block 0 is never used."""

    def __init__(
        self, vocab: int, num_gpu_blocks: int, num_host_blocks: int, temperature: float
    ) -> None:
        self._vocab = vocab
        self._temperature = temperature
        self._gpu_blocks = scattered(num_gpu_blocks)
        self._host_blocks = scattered(num_host_blocks)
        self._steps = 0

    def prefill(self, num_prompts: int, length: int, sampled: int) -> m.GpuBatch:
        """Prompts of `length` tokens, the last `sampled` of them sampling their first token."""
        batch = self._gpu(num_prompts, RowKind.PREFILL_GPU, 0, length)
        batch.sample[: num_prompts - sampled] = 0
        return batch

    def decode(self, rows: int, context: int) -> m.GpuBatch:
        """One step of HBM-resident rows, `context` KV tokens each, the new one included."""
        return self._gpu(rows, RowKind.DECODE, context - 1, 1)

    def swap(self, num_blocks: int, kind: int) -> m.GpuBatch:
        """A step without rows that swaps so many blocks."""
        batch = self._gpu(0, RowKind.DECODE, 0, 1)
        ends = (self._gpu_blocks[:num_blocks], self._host_blocks[:num_blocks])
        source, target = ends if kind == TransferKind.SWAP_OUT else ends[::-1]
        batch.migration_ids = np.array([self._steps], np.int64)
        batch.migration_kinds = np.array([kind], np.uint8)
        batch.migration_offsets = np.array([0, num_blocks], np.int32)
        batch.source_blocks, batch.target_blocks = source, target
        return batch

    def host_decode(self, rows: int, context: int, route: Route) -> m.CpuBatch:
        """One iteration of host-resident rows."""
        self._steps += 1
        offsets, blocks = tables(self._host_blocks, rows, context)
        return m.CpuBatch(
            step=self._steps,
            route=ROUTES.index(route),
            request_ids=np.arange(rows, dtype=np.int64),
            token_ids=self._tokens(rows),
            starts=np.full(rows, context - 1, np.int32),
            block_offsets=offsets,
            blocks=blocks,
            **self._sampling(rows),
        )

    def _gpu(self, rows: int, kind: int, start: int, num_tokens: int) -> m.GpuBatch:
        self._steps += 1
        offsets, blocks = tables(self._gpu_blocks, rows, start + num_tokens)
        none = np.empty(0, np.int32)
        return m.GpuBatch(
            step=self._steps,
            epoch=0,
            request_ids=np.arange(rows, dtype=np.int64),
            kinds=np.full(rows, kind, np.uint8),
            starts=np.full(rows, start, np.int32),
            num_tokens=np.full(rows, num_tokens, np.int32),
            sample=np.ones(rows, np.uint8),
            transfer_ids=np.full(rows, -1, np.int64),
            token_ids=self._tokens(rows * num_tokens),
            block_offsets=offsets,
            blocks=blocks,
            **self._sampling(rows),
            migration_ids=np.empty(0, np.int64),
            migration_kinds=np.empty(0, np.uint8),
            migration_offsets=np.zeros(1, np.int32),
            source_blocks=none,
            target_blocks=none,
        )

    def _tokens(self, count: int) -> I32:
        return (np.arange(count) * 7919 % self._vocab).astype(np.int32)

    def _sampling(self, rows: int) -> dict[str, Any]:
        return {
            "temperature": np.full(rows, self._temperature, np.float32),
            "top_k": np.zeros(rows, np.int32),
            "top_p": np.ones(rows, np.float32),
            "uniform": np.linspace(0.05, 0.95, rows, dtype=np.float32),
        }


def blocks_of(rows: int, context: int) -> int:
    """Blocks of `rows` requests with `context` KV tokens each."""
    return rows * -(-context // BLOCK_TOKENS)


def tables(blocks: I32, rows: int, context: int) -> tuple[I32, I32]:
    """(offsets, blocks) of `rows` rows that share no block."""
    each = -(-context // BLOCK_TOKENS)
    assert rows * each <= len(blocks), "the pool was sized for this sweep"
    return np.arange(rows + 1, dtype=np.int32) * np.int32(each), blocks[: rows * each]


def scattered(num_blocks: int) -> I32:
    order: Sequence[int] = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)
    return np.array(order, np.int32)
