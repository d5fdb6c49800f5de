"""What a request says (tokens, sampling), and how a scheduled step becomes a worker's message.

The scheduler never sees a token, the workers never see a request; here both meet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualpace.graphs.uniform import uniform
from dualpace.runtime import messages
from dualpace.runtime.routing import Route
from dualpace.runtime.schedule.rounds import CpuStep, GpuStep, Row, RowKind, TransferKind
from dualpace.runtime.types import Request, blocks_for

_KINDS = {
    RowKind.DECODE: messages.DECODE,
    RowKind.PREFILL_GPU: messages.PREFILL_GPU,
    RowKind.PREFILL_CPU: messages.PREFILL_CPU,
}
_TRANSFER_KINDS = {
    TransferKind.SWAP_OUT: messages.SWAP_OUT,
    TransferKind.SWAP_IN: messages.SWAP_IN,
}
ROUTES = tuple(Route)


@dataclass(slots=True)
class Conversation:
    """A request's content: prompt and output tokens so far, and how to sample the next one."""

    request: Request
    tokens: list[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_eos: bool

    def input_tokens(self, row: Row) -> list[int]:
        """Tokens at positions `row.start ...`; the one still being sampled is TOKEN_IN_FLIGHT."""
        end = row.start + row.num_tokens
        known = self.tokens[row.start : end]
        return known + [messages.TOKEN_IN_FLIGHT] * (row.num_tokens - len(known))


@dataclass(slots=True)
class _Sampling:
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float32]


def _sampling(rows: Sequence[Row], conversations: Sequence[Conversation]) -> _Sampling:
    return _Sampling(
        np.array([c.temperature for c in conversations], np.float32),
        np.array([c.top_k for c in conversations], np.int32),
        np.array([c.top_p for c in conversations], np.float32),
        np.array(
            [
                uniform(c.seed, row.context_len) if c.temperature > 0 else 0.0
                for row, c in zip(rows, conversations, strict=True)
            ],
            np.float32,
        ),
    )


def _flat(lists: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(offsets, all items one after another)."""
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(items) for items in lists], out=offsets[1:])
    flat = [item for items in lists for item in items]
    return offsets, np.array(flat, np.int32)


def _block_table(row: Row) -> Sequence[int]:
    """The list of a row may have grown for a later step."""
    return row.blocks[: blocks_for(row.context_len)]


def gpu_batch(step: GpuStep, conversations: Mapping[int, Conversation]) -> messages.GpuBatch:
    rows = step.rows
    content = [conversations[row.request.id] for row in rows]
    sampling = _sampling(rows, content)
    _, tokens = _flat([c.input_tokens(row) for row, c in zip(rows, content, strict=True)])
    block_offsets, blocks = _flat([_block_table(row) for row in rows])
    transfers = step.transfers
    migration_offsets, sources = _flat([t.src_blocks for t in transfers])
    _, targets = _flat([t.dst_blocks for t in transfers])
    return messages.GpuBatch(
        step=step.number,
        request_ids=np.array([row.request.id for row in rows], np.int64),
        kinds=np.array([_KINDS[row.kind] for row in rows], np.uint8),
        starts=np.array([row.start for row in rows], np.int32),
        num_tokens=np.array([row.num_tokens for row in rows], np.int32),
        sample=np.array([row.sample for row in rows], np.uint8),
        transfer_ids=np.array([row.transfer_id for row in rows], np.int64),
        token_ids=tokens,
        block_offsets=block_offsets,
        blocks=blocks,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        uniform=sampling.uniform,
        migration_ids=np.array([t.id for t in transfers], np.int64),
        migration_kinds=np.array([_TRANSFER_KINDS[t.kind] for t in transfers], np.uint8),
        migration_offsets=migration_offsets,
        source_blocks=sources,
        target_blocks=targets,
    )


def lockstep_batch(
    step: GpuStep, conversations: Mapping[int, Conversation], epoch: int
) -> messages.LockstepBatch:
    """The host rows of a step. Their input tokens are always known: who is in a step in flight is
    not in the next one."""
    first, second = step.host_rows
    rows = [*first, *second]
    content = [conversations[row.request.id] for row in rows]
    sampling = _sampling(rows, content)
    _, tokens = _flat([c.input_tokens(row) for row, c in zip(rows, content, strict=True)])
    block_offsets, blocks = _flat([_block_table(row) for row in rows])
    return messages.LockstepBatch(
        step=step.number,
        split=len(first),
        epoch=epoch,
        request_ids=np.array([row.request.id for row in rows], np.int64),
        token_ids=tokens,
        starts=np.array([row.start for row in rows], np.int32),
        block_offsets=block_offsets,
        blocks=blocks,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        uniform=sampling.uniform,
    )


def cpu_batch(
    step: CpuStep, conversations: Mapping[int, Conversation], route: Route
) -> messages.CpuBatch:
    rows = step.rows
    content = [conversations[row.request.id] for row in rows]
    sampling = _sampling(rows, content)
    _, tokens = _flat([c.input_tokens(row) for row, c in zip(rows, content, strict=True)])
    block_offsets, blocks = _flat([_block_table(row) for row in rows])
    return messages.CpuBatch(
        step=step.number,
        route=ROUTES.index(route),
        request_ids=np.array([row.request.id for row in rows], np.int64),
        token_ids=tokens,
        starts=np.array([row.start for row in rows], np.int32),
        block_offsets=block_offsets,
        blocks=blocks,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        uniform=sampling.uniform,
    )
