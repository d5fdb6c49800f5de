"""A batch message as arrays ready for the device: tokens in compute order, slots, block tables,
sampling rows.

numpy only; knows nothing about tensors, weights or queues.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dualpace.block import BLOCK_TOKENS
from dualpace.runtime.messages import TOKEN_IN_FLIGHT, CpuBatch, Edits, GpuBatch
from dualpace.runtime.types import RowKind
from dualpace.runtime.wire import U8, decode

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class PromptRow:
    """A prompt, or a piece of one: tokens `first : first + num_tokens` of the batch, from position
    `start`.
    """

    first: int
    num_tokens: int
    start: int
    blocks: Int32
    transfer_id: int  # -1 unless its KV goes to the host


@dataclass(slots=True, frozen=True)
class Asking:
    """Who wants log-probabilities."""

    rows: Int64  # [Q], by place among the sampled rows, ascending
    best: int  # likeliest tokens beside the drawn one: the most that any row of the batch wants


@dataclass(slots=True, frozen=True)
class SamplingArrays:
    """One entry a sampled row; what `SamplingRows` is made of."""

    temperature: Float32
    top_k: Int32
    top_p: Float32
    uniform: Float32
    edits: Edits | None = None  # by place among these entries; None: no row has any
    asking: Asking | None = None  # None: nobody asks

    @property
    def needs_logits(self) -> bool:
        """Whether some row's logits are edited or told about."""
        return self.edits is not None or self.asking is not None


@dataclass(slots=True, frozen=True)
class DecodeArrays:
    """Decode rows, one token each. `slots` says where its K/V goes: block * 16 + offset."""

    block_tables: Int32  # [B, max_blocks], unused entries 0 (the scratch block)
    context_lens: Int32  # [B], the new token included
    slots: Int64  # [B]


@dataclass(slots=True, frozen=True)
class GpuWork:
    """One GPU batch, its T tokens sorted by phase: decodes, then Prefill-to-GPU (later pieces of
    prompts first), then Prefill-to-CPU.
    """

    step: int
    num_rows: int
    token_ids: Int64  # [T]; TOKEN_IN_FLIGHT where the step before samples it
    positions: Int64  # [T]
    slots: Int64  # [tokens whose KV stays in HBM]
    num_decodes: int
    decodes: DecodeArrays
    hbm_prompts: list[PromptRow]
    host_prompts: list[PromptRow]
    in_flight: list[tuple[int, int]]  # token index, request id
    sampled_rows: Int64  # [S] rows of the message, in compute order
    sampled_ids: Int64  # [S] their request ids
    last_tokens: Int64  # [S] index of each one's last token
    sampling: SamplingArrays

    @property
    def num_hbm_tokens(self) -> int:
        return len(self.slots)


def gpu_work(batch: GpuBatch) -> GpuWork:
    """All but host rows."""
    own = slice(num_own_rows(batch))
    order = np.argsort(2 * batch.kinds[own] + (batch.starts[own] == 0), kind="stable")
    kinds = batch.kinds[order]
    counts = batch.num_tokens[order].astype(np.int64)
    first = np.cumsum(counts) - counts
    row_of = np.repeat(np.arange(len(order)), counts)
    place = np.arange(len(row_of)) - first[row_of]  # of a token within its row
    sent_first = (np.cumsum(batch.num_tokens) - batch.num_tokens)[order]
    token_ids = batch.token_ids[sent_first[row_of] + place].astype(np.int64)
    positions = batch.starts[order].astype(np.int64)[row_of] + place

    num_decodes = int((kinds == RowKind.DECODE).sum())
    assert (counts[:num_decodes] == 1).all(), "a decode row computes one token"
    num_hbm_tokens = int(counts[kinds != RowKind.PREFILL_CPU].sum())
    hbm = slice(0, num_hbm_tokens)
    slots = _slots(batch.blocks, batch.block_offsets[:-1][order][row_of[hbm]], positions[hbm])
    prompts = [
        PromptRow(
            int(first[i]),
            int(counts[i]),
            int(batch.starts[row]),
            batch.blocks[batch.block_offsets[row] : batch.block_offsets[row + 1]],
            int(batch.transfer_ids[row]),
        )
        for i, row in enumerate(order.tolist())
        if i >= num_decodes
    ]
    num_hbm_prompts = int((kinds != RowKind.PREFILL_CPU).sum()) - num_decodes
    sampled = batch.sample[order] != 0
    rows = order[sampled]
    return GpuWork(
        step=batch.step,
        num_rows=len(order),
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        num_decodes=num_decodes,
        decodes=_decode_arrays(batch, order[:num_decodes]),
        hbm_prompts=prompts[:num_hbm_prompts],
        host_prompts=prompts[num_hbm_prompts:],
        in_flight=[
            (int(token), int(batch.request_ids[order[row_of[token]]]))
            for token in np.flatnonzero(token_ids == TOKEN_IN_FLIGHT)
        ],
        sampled_rows=rows,
        sampled_ids=batch.request_ids[rows],
        last_tokens=(first + counts - 1)[sampled],
        sampling=_sampling(batch, rows),
    )


@dataclass(slots=True, frozen=True)
class CpuWork:
    """One decode iteration over B host-resident rows, in the message's order."""

    step: int
    route: int
    token_ids: Int64  # [B]
    positions: Int64  # [B]
    decodes: DecodeArrays
    sampling: SamplingArrays

    def __len__(self) -> int:
        return len(self.token_ids)


def cpu_work(batch: CpuBatch) -> CpuWork:
    return _host_work(batch, batch.token_ids, np.arange(len(batch.request_ids)), batch.route)


def num_own_rows(batch: GpuBatch) -> int:
    """Rows before the host rows."""
    return int((batch.kinds < RowKind.HOST_FIRST).sum())


def host_work(batch: GpuBatch) -> tuple[CpuWork, CpuWork]:
    """Both sub-batches of host rows; either may be empty."""
    tokens = batch.token_ids[np.cumsum(batch.num_tokens) - batch.num_tokens]
    first, second = (
        _host_work(batch, tokens, np.flatnonzero(batch.kinds == kind))
        for kind in (RowKind.HOST_FIRST, RowKind.HOST_SECOND)
    )
    return first, second


def _host_work(batch: CpuBatch | GpuBatch, tokens: Int32, rows: Int64, route: int = 0) -> CpuWork:
    """`tokens`: each row's first."""
    return CpuWork(
        step=batch.step,
        route=route,
        token_ids=tokens[rows].astype(np.int64),
        positions=batch.starts[rows].astype(np.int64),
        decodes=_decode_arrays(batch, rows),
        sampling=_sampling(batch, rows),
    )


def _decode_arrays(batch: GpuBatch | CpuBatch, rows: Int64) -> DecodeArrays:
    starts = batch.starts[rows].astype(np.int64)
    first_block = batch.block_offsets[:-1][rows]
    counts = batch.block_offsets[1:][rows] - first_block
    columns = np.arange(counts.max(initial=0))
    owned = columns < counts[:, None]
    tables = np.zeros(owned.shape, np.int32)
    tables[owned] = batch.blocks[(first_block[:, None] + columns)[owned]]
    return DecodeArrays(
        block_tables=tables,
        context_lens=(starts + 1).astype(np.int32),
        slots=_slots(batch.blocks, first_block, starts),
    )


def _slots(blocks: Int32, first_block: Int32, positions: Int64) -> Int64:
    slots: Int64 = blocks[first_block + positions // BLOCK_TOKENS].astype(np.int64)
    slots *= BLOCK_TOKENS
    slots += positions % BLOCK_TOKENS
    return slots


def _sampling(batch: GpuBatch | CpuBatch, rows: Int64) -> SamplingArrays:
    return SamplingArrays(
        temperature=batch.temperature[rows],
        top_k=batch.top_k[rows],
        top_p=batch.top_p[rows],
        uniform=batch.uniform[rows],
        edits=edits_of(batch, rows),
        asking=asking_of(batch.logprobs, rows),
    )


def asking_of(asked: U8, rows: Int64) -> Asking | None:
    """Of these rows of a message that says of each what it asks for (`messages.asks_for`)."""
    if not len(asked):
        return None
    places = np.flatnonzero(asked[rows])
    return Asking(places, int(asked.max()) - 1) if len(places) else None


def edits_of(batch: GpuBatch | CpuBatch, rows: Int64) -> Edits | None:
    """What concerns these rows of the message, told by their places here; None if nothing does."""
    if not len(batch.edits):
        return None
    edits = decode(batch.edits.data)
    assert isinstance(edits, Edits)
    places = {row: place for place, row in enumerate(rows.tolist())}
    here = np.array([places.get(row, -1) for row in edits.rows.tolist()], np.int32)
    kept = here >= 0
    if not kept.any():
        return None
    if kept.all():
        return replace(edits, rows=here)
    owner = (np.cumsum(kept) - 1).astype(np.int32)  # as those before it are counted now
    bias, seen = kept[edits.bias_owner], kept[edits.seen_owner]
    masked = edits.masked != 0
    return Edits(
        rows=here[kept],
        min_p=edits.min_p[kept],
        presence=edits.presence[kept],
        frequency=edits.frequency[kept],
        repetition=edits.repetition[kept],
        bias_owner=owner[edits.bias_owner[bias]],
        bias_token=edits.bias_token[bias],
        bias=edits.bias[bias],
        only=edits.only[kept],
        seen_owner=owner[edits.seen_owner[seen]],
        seen_token=edits.seen_token[seen],
        seen_count=edits.seen_count[seen],
        masked=edits.masked[kept],
        masks=edits.masks[np.repeat(kept[masked], len(edits.masks) // max(1, masked.sum()))],
    )
