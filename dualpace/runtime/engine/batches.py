"""What a request says (tokens, sampling), and how a scheduled step becomes a worker's message.

The scheduler never sees a token, the workers never see a request; here both meet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def _flat(lists: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(offsets, all items one after another)."""
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(items) for items in lists], out=offsets[1:])
    flat = [item for items in lists for item in items]
    return offsets, np.array(flat, np.int32)


def _block_table(row: Row) -> Sequence[int]:
    """The list of a row may have grown for a later step."""
    return row.blocks[: blocks_for(row.context_len)]


def _columns(
    rows: Sequence[Row], conversations: Mapping[int, Conversation]
) -> dict[str, npt.NDArray[Any]]:
    """What every batch says of its rows, by the messages' names."""
    content = [conversations[row.request.id] for row in rows]
    _, token_ids = _flat([c.input_tokens(row) for row, c in zip(rows, content, strict=True)])
    block_offsets, blocks = _flat([_block_table(row) for row in rows])
    numbers = [
        uniform(c.seed, row.context_len) if c.temperature > 0 else 0.0
        for row, c in zip(rows, content, strict=True)
    ]
    return {
        "request_ids": np.array([row.request.id for row in rows], np.int64),
        "token_ids": token_ids,
        "starts": np.array([row.start for row in rows], np.int32),
        "block_offsets": block_offsets,
        "blocks": blocks,
        "temperature": np.array([c.temperature for c in content], np.float32),
        "top_k": np.array([c.top_k for c in content], np.int32),
        "top_p": np.array([c.top_p for c in content], np.float32),
        "uniform": np.array(numbers, np.float32),
    }


def gpu_batch(
    step: GpuStep, conversations: Mapping[int, Conversation], epoch: int
) -> messages.GpuBatch:
    """Host rows' input tokens are always known: who is in a step in flight is not in the next."""
    first, second = step.host_rows
    rows, transfers = [*step.rows, *first, *second], step.transfers
    kinds = [_KINDS[row.kind] for row in step.rows]
    kinds += [messages.HOST_FIRST] * len(first) + [messages.HOST_SECOND] * len(second)
    migration_offsets, sources = _flat([t.src_blocks for t in transfers])
    _, targets = _flat([t.dst_blocks for t in transfers])
    return messages.GpuBatch(
        step=step.number,
        epoch=epoch,
        kinds=np.array(kinds, np.uint8),
        num_tokens=np.array([row.num_tokens for row in rows], np.int32),
        sample=np.array([row.sample for row in rows], np.uint8),
        transfer_ids=np.array([row.transfer_id for row in rows], np.int64),
        migration_ids=np.array([t.id for t in transfers], np.int64),
        migration_kinds=np.array([_TRANSFER_KINDS[t.kind] for t in transfers], np.uint8),
        migration_offsets=migration_offsets,
        source_blocks=sources,
        target_blocks=targets,
        **_columns(rows, conversations),
    )


def cpu_batch(
    step: CpuStep, conversations: Mapping[int, Conversation], route: Route
) -> messages.CpuBatch:
    columns = _columns(step.rows, conversations)
    return messages.CpuBatch(step=step.number, route=ROUTES.index(route), **columns)
