"""How a scheduled step becomes a worker's message.

The scheduler never sees a token, the workers never see a request; here both meet.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dualpace.graphs.uniform import uniforms
from dualpace.runtime import messages
from dualpace.runtime.engine.conversations import Conversation
from dualpace.runtime.engine.edits import encode_edits
from dualpace.runtime.routing import ROUTES, Route
from dualpace.runtime.schedule.rounds import CpuStep, GpuStep, Row
from dualpace.runtime.wire import U8

_SEED_MASK = (1 << 64) - 1


def _flat(lists: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(offsets, all items one after another)."""
    return _offsets(lists), np.array(list(chain.from_iterable(lists)), np.int32)


def _bytes(values: Sequence[int]) -> npt.NDArray[np.uint8]:
    """numpy itself takes twenty times as long where they are of an enumeration."""
    return np.frombuffer(bytes(values), np.uint8)


def _offsets(lists: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(items) for items in lists], out=offsets[1:])
    return offsets


def _uniforms(
    rows: Sequence[Row], content: Sequence[Conversation], temperature: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """One for each row that samples at random, 0 for the others."""
    random = temperature > 0
    if not random.any():
        return np.zeros(len(rows), np.float32)
    seeds = np.array([c.seed & _SEED_MASK for c in content], np.uint64)
    positions = np.array([row.start + row.num_tokens for row in rows], np.uint64)
    return np.where(random, uniforms(seeds, positions), np.float32(0))


def _edits(rows: Sequence[Row], content: Sequence[Conversation]) -> U8:
    """Of rows that sample from edited logits; no bytes where none does."""
    due = []
    edited = [(place, c, c.editor) for place, c in enumerate(content) if c.editor is not None]
    for place, c, editor in edited:
        row = rows[place]
        position = row.start + row.num_tokens
        if row.sample and editor.is_due(position):
            is_known = len(c.tokens) == position
            assert is_known or not c.request.needs_last_token, "a token is in flight"
            due.append((place, position, editor, c.tokens))
    return encode_edits(due)


def _asked(content: Sequence[Conversation]) -> U8:
    asked = [c.logprobs for c in content]
    return _bytes(asked) if any(asked) else messages.no_bytes()


def _columns(
    rows: Sequence[Row], conversations: Mapping[int, Conversation]
) -> dict[str, npt.NDArray[Any]]:
    """What every batch says of its rows, by the messages' names."""
    ids = [row.request.id for row in rows]
    content = [conversations[request_id] for request_id in ids]
    tokens = [c.input_tokens(row) for row, c in zip(rows, content, strict=True)]
    tables = [c.block_table(row) for row, c in zip(rows, content, strict=True)]
    temperature = np.array([c.temperature for c in content], np.float32)
    return {
        "request_ids": np.array(ids, np.int64),
        "token_ids": np.array(list(chain.from_iterable(tokens)), np.int32),
        "starts": np.array([row.start for row in rows], np.int32),
        "block_offsets": _offsets(tables),
        "blocks": np.frombuffer(b"".join(tables), np.int32),
        "temperature": temperature,
        "top_k": np.array([c.top_k for c in content], np.int32),
        "top_p": np.array([c.top_p for c in content], np.float32),
        "uniform": _uniforms(rows, content, temperature),
        "edits": _edits(rows, content),
        "logprobs": _asked(content),
    }


def gpu_batch(
    step: GpuStep, conversations: Mapping[int, Conversation], epoch: int
) -> messages.GpuBatch:
    """Host rows' input tokens are always known: who is in a step in flight is not in the next."""
    rows, transfers = step.all_rows, step.transfers
    migration_offsets, sources = _flat([t.src_blocks for t in transfers])
    _, targets = _flat([t.dst_blocks for t in transfers])
    return messages.GpuBatch(
        step=step.number,
        epoch=epoch,
        kinds=_bytes([row.kind for row in rows]),
        num_tokens=np.array([row.num_tokens for row in rows], np.int32),
        sample=_bytes([row.sample for row in rows]),
        transfer_ids=np.array([row.transfer_id for row in rows], np.int64),
        migration_ids=np.array([t.id for t in transfers], np.int64),
        migration_kinds=_bytes([t.kind for t in transfers]),
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
