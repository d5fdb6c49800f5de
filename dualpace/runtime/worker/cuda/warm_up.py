"""The rounds a device's worker runs before it is ready: prompts, decodes and moves of the kinds and
sizes that kernels are specialised for, in the scratch block. What is not run here would be compiled
or loaded while a request waits. Knows nothing about how rounds run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dualpace.graphs.gpu.peer_sums import MAX_ROWS
from dualpace.runtime.logit_rules import words_of_mask
from dualpace.runtime.messages import Edits, GpuBatch, asks_for
from dualpace.runtime.plan import Plan
from dualpace.runtime.types import RowKind, TransferKind
from dualpace.runtime.wire import U8


def batches(buckets: Sequence[int], host_tier: bool, plan: Plan) -> Iterator[GpuBatch]:
    """A model's rounds without host rows; `host_tier`: whether KV may leave for the host."""
    context, vocab = plan.model.max_context, plan.model.vocab
    hosts = (RowKind.PREFILL_CPU,) if host_tier else ()
    if host_tier:
        for count in (1, 3, 16):
            for kind in (TransferKind.SWAP_OUT, TransferKind.SWAP_IN):
                yield _batch([], 0.0, kind, count)
    # Each bucket may have products of its own; above the rows that peers add up in their kernels,
    # sums over ranks go another way.
    above = [MAX_ROWS + 1, MAX_ROWS + 16] if plan.gpu.tp > 1 else []
    for count in (*buckets, *(n for n in above if n <= plan.gpu.max_batched_tokens)):
        yield _batch(_prompts(count, context), 0.0)
    for count in (1, 16, 33, 50, 64, 96, 97):
        for kind in (RowKind.PREFILL_GPU, *hosts):
            for temperature in (0.0, 0.7):
                yield _batch([(kind, 0, count)], temperature)
        yield _batch([(RowKind.DECODE, 5, 1), (RowKind.PREFILL_GPU, 32, count)], 0.0)
        yield _batch([(RowKind.DECODE, 5, 1), (RowKind.PREFILL_GPU, 0, count)], 0.7)
    # Loads what is only ever launched.
    for rows in ([(RowKind.DECODE, 5, 1)], [(RowKind.PREFILL_GPU, 0, 16)]):
        asks = np.full(1, asks_for(1), np.uint8)
        yield replace(_batch(rows, 0.7), edits=_every_edit(vocab), logprobs=asks)


def pairs(buckets: Sequence[int], max_host_rows: int) -> Iterator[GpuBatch]:
    """Host rows of the scratch block beside decodes, beside prompts, and alone."""
    largest = min(16, buckets[-1], max_host_rows)
    for temperature in (0.0, 0.7):
        for count in sorted({1, min(3, largest), largest}):
            kinds = RowKind.HOST_FIRST, RowKind.HOST_SECOND
            first, second = ([(kind, 5, 1)] * count for kind in kinds)
            for own in ([(RowKind.DECODE, 5, 1)], [(RowKind.PREFILL_GPU, 0, 16)], []):
                for host in (first, second, (first + second)[-max_host_rows:]):
                    yield _batch(own + host, temperature)


def _prompts(count: int, longest: int) -> list[tuple[RowKind, int, int]]:
    """Prompts of `count` tokens together, none above `longest`."""
    lens = [longest] * (count // longest) + [count % longest] * (count % longest > 0)
    return [(RowKind.PREFILL_GPU, 0, num_tokens) for num_tokens in lens]


def _every_edit(vocab: int) -> U8:
    """Each kind of edit, for the first row of a batch."""
    place, value = np.zeros(1, np.int32), np.ones(1, np.float32)
    edits = Edits(
        rows=place,
        min_p=value,
        presence=value,
        frequency=value,
        repetition=value,
        bias_owner=place,
        bias_token=place,
        bias=value,
        only=np.ones(1, np.uint8),
        seen_owner=place,
        seen_token=place,
        seen_count=place,
        masked=np.ones(1, np.uint8),
        masks=np.full(words_of_mask(vocab), -1, np.int32),
    )
    return np.frombuffer(edits.encode(), np.uint8)


def _batch(
    rows: Sequence[tuple[RowKind, int, int]],
    temperature: float,
    move: TransferKind = TransferKind.SWAP_OUT,
    num_moved: int = 0,
) -> GpuBatch:
    """Rows of (kind, start, tokens), and a swap of the scratch block, so many times over."""
    kinds, starts, counts = np.array(rows, np.int64).reshape(-1, 3).T
    num_blocks = -(-(starts + counts) // 16)
    num_rows = len(rows)
    return GpuBatch(
        step=0,
        epoch=0,
        request_ids=np.arange(num_rows, dtype=np.int64),
        kinds=kinds.astype(np.uint8),
        starts=starts.astype(np.int32),
        num_tokens=counts.astype(np.int32),
        sample=np.ones(num_rows, np.uint8),
        transfer_ids=np.full(num_rows, -1, np.int64),
        token_ids=np.ones(int(counts.sum()), np.int32),
        block_offsets=np.concatenate(([0], np.cumsum(num_blocks))).astype(np.int32),
        blocks=np.zeros(int(num_blocks.sum()), np.int32),
        temperature=np.full(num_rows, temperature, np.float32),
        top_k=np.full(num_rows, 4, np.int32),
        top_p=np.full(num_rows, 0.9, np.float32),
        uniform=np.full(num_rows, 0.5, np.float32),
        migration_ids=np.zeros(min(num_moved, 1), np.int64),
        migration_kinds=np.full(min(num_moved, 1), move, np.uint8),
        migration_offsets=np.array([0, num_moved][: 1 + min(num_moved, 1)], np.int32),
        source_blocks=np.zeros(num_moved, np.int32),
        target_blocks=np.zeros(num_moved, np.int32),
    )
