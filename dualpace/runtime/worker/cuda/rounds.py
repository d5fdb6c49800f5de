"""Main rounds on a device. Launching runs ahead of the device; tokens are read when they arrive.

Decodes alone replay a captured step; with prompts a round is launched kernel by kernel, its dense
stages once over all rows. A round scheduled ahead takes tokens that the host has not seen from the
device's own table.
"""

# mypy: allow-untyped-calls

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualpace.graphs.gpu.attention import Prefill
from dualpace.graphs.gpu.planned import PackedInputs
from dualpace.graphs.sampling import SamplingRows
from dualpace.runtime.messages import GpuBatch, StepDone
from dualpace.runtime.worker.copies import Event
from dualpace.runtime.worker.cuda import batches
from dualpace.runtime.worker.cuda.compiles import Compiles
from dualpace.runtime.worker.cuda.events import DeviceClock, DeviceEvent
from dualpace.runtime.worker.cuda.model import DeviceModel, second_kv
from dualpace.runtime.worker.cuda.transfers import DeviceTransfers, WriteOut
from dualpace.runtime.worker.rows import GpuWork, Int32, gpu_work

_READS = 4  # pinned buffers for tokens on their way to the host
_AHEAD = 1  # stage tasks queued behind the one on the device, where assists are served between
_LAST = 4  # segments queued at once at a round's end, so that preparing the next one is hidden
_IDLE = {"source": -1, "slots": -1, "top_p": 1.0}

Tasks = Iterator[list[Event]]


@dataclass(slots=True)
class _Launched:
    """A round that the device has or will have run."""

    work: GpuWork
    launched_s: float
    was_idle: bool
    start: DeviceEvent | None = None
    end: DeviceEvent | None = None
    tokens: Tensor | None = None  # pinned int32 [S]
    copies: list[tuple[int, list[DeviceEvent]]] | None = None  # Prefill-to-CPU: transfer, events


class DeviceRounds:
    """Runs batches in order. `boundaries`: stage by stage, with at most one task queued behind the
    one on the device; else as far ahead as there are batches.
    """

    def __init__(
        self,
        model: DeviceModel,
        transfers: DeviceTransfers,
        write_out: WriteOut | None,
        compiles: Compiles,
        boundaries: bool,
    ) -> None:
        self._model, self._transfers, self._write_out = model, transfers, write_out
        self._compiles = compiles
        self._boundaries = boundaries
        self._clock = DeviceClock()
        self._launched: deque[_Launched] = deque()
        self._index: dict[int, int] = {}  # request -> its entry of `model.sampled`
        device, rows = model.forward.device, len(model.rows.x)
        self._kv_rows = (model.rows, second_kv(model.rows))
        limit = len(model.sampled)
        self._inputs = PackedInputs(
            {
                "token_ids": (torch.int64, rows),
                "positions": (torch.int64, rows),
                "slots": (torch.int64, rows),
                "source": (torch.int32, rows),
                "last_tokens": (torch.int64, limit),
                "temperature": (torch.float32, limit),
                "top_k": (torch.int32, limit),
                "top_p": (torch.float32, limit),
                "u": (torch.float32, limit),
                "host_blocks": (torch.int32, rows // 16 + 4 * limit),
            },
            device,
        )
        self._prefills = _Prefills(model)
        self._reads = deque(
            torch.zeros(limit, dtype=torch.int32, pin_memory=True) for _ in range(_READS)
        )
        self._marks: deque[DeviceEvent] = deque(maxlen=_AHEAD + 1)

    # ---- what the worker asks

    def ready(self) -> None:
        self._compiles.ready()

    @property
    def must_poll(self) -> bool:
        return bool(self._launched)

    def take_finished(self) -> list[StepDone]:
        """Rounds whose tokens have arrived, in order; their copies are tracked from now on."""
        done = []
        while self._launched and _has_ended(self._launched[0]):
            done.append(self._finish(self._launched.popleft()))
        return done

    def _finish(self, round: _Launched) -> StepDone:
        work = round.work
        tokens = np.full(work.num_rows, -1, np.int32)
        started_s, duration_s = round.launched_s, 0.0
        if round.start is not None and round.end is not None:
            started_s, duration_s = self._clock.interval(
                round.launched_s, round.was_idle, round.start, round.end
            )
        if round.tokens is not None:
            tokens[work.sampled_rows] = round.tokens.numpy()
        for transfer_id, events in round.copies or ():
            self._transfers.track(transfer_id, events)
        return StepDone(work.step, started_s, duration_s, tokens, self._compiles.after_ready)

    def tasks(self, batch: GpuBatch) -> Tasks:
        """Queues the batch; each step one stage task, or everything where nobody asks between."""
        launched_s = time.monotonic()
        work = gpu_work(batch)
        was_idle = not self._launched or _has_ended(self._launched[-1])
        round = _Launched(work, launched_s, was_idle)
        self._launched.append(round)
        self._transfers.start_migrations(batch)
        if not work.num_rows:
            return
        source = batches.sources(work, self._index)
        if work.num_decodes == work.num_rows:
            yield from self._decode(round, source)
        else:
            yield from self._mixed(round, source)
        if len(work.sampled_rows):
            self._index = batches.index_of(work.sampled_ids)
            self._read(round)
        round.end = DeviceEvent(timed=True)

    # ---- rounds

    def _decode(self, round: _Launched, source: Int32) -> Tasks:
        model, work = self._model, round.work
        bucket = model.bucket(work.num_rows)
        graphs = model.decodes[bucket]
        graphs.begin(batches.decode_batch(work, source, bucket))
        round.start = DeviceEvent(timed=True)
        if self._boundaries:
            graphs.pre_layer()
            for index in range(graphs.num_segments):
                graphs.segment(index)
                yield self._boundary(graphs.num_segments - 1 - index)
        else:
            graphs.whole()
            yield []
        graphs.post_layer()

    def _mixed(self, round: _Launched, source: Int32) -> Tasks:
        model, work = self._model, round.work
        forward, count = model.forward, len(work.token_ids)
        if self._write_out is not None:
            self._write_out.before_round()
        self._inputs.send(batches.mixed_arrays(work, source), idle=_IDLE)
        self._inputs.sent()
        views = {name: view[:count] for name, view in self._inputs.views.items()}
        bucket = model.bucket(max(work.num_decodes, 1))
        attend = model.attends[bucket]
        if work.num_decodes:
            attend.plan(batches.paged_decodes(work.decodes, bucket))
        prefills = self._prefills.plan(work)
        by_turn = [rows.first(count) for rows in self._kv_rows]
        q, attn = model.rows.q, model.rows.attn.view_as(model.rows.q)
        copies: list[tuple[int, list[DeviceEvent]]] = []
        round.copies = copies
        round.start = DeviceEvent(timed=True)
        forward.embed(by_turn[0], views["token_ids"], views["source"], model.sampled)
        for layer, cache in enumerate(model.caches):
            rows = by_turn[layer % 2 if work.host_prompts else 0]
            if work.host_prompts:
                assert self._write_out is not None
                self._write_out.before_layer(layer)
            forward.pre_attention(layer, rows, views["positions"], cache, views["slots"])
            if work.host_prompts:
                assert self._write_out is not None
                blocks = self._inputs.views["host_blocks"]
                last = self._write_out.layer(layer, rows.k, rows.v, blocks, work.host_prompts)
                copies[:] = [(prompt.transfer_id, [last]) for prompt in work.host_prompts]
            if work.num_decodes:  # padding rows write where prompts are about to
                attend.run(q[:bucket], cache, attn[:bucket])
            for first, end, prefill in prefills:
                part = slice(first, end)
                prefill.run(q[part], rows.k[part], rows.v[part], attn[part], cache)
            forward.post_attention(layer, rows)
            yield self._boundary(len(model.caches) - 1 - layer)
        sampled = len(work.sampled_rows)
        if sampled:
            h = by_turn[0].h.index_select(0, self._inputs.views["last_tokens"][:sampled])
            self._sample(h, work, model.sampled[:sampled])

    def _sample(self, h: Tensor, work: GpuWork, tokens: Tensor) -> None:
        if not work.sampling.temperature.any():
            self._model.forward.greedy(h, tokens)
            return
        views = {name: view[: len(h)] for name, view in self._inputs.views.items()}
        how = SamplingRows(views["temperature"], views["top_k"], views["top_p"], views["u"])
        self._model.forward.sample(h, how, tokens)

    def _read(self, round: _Launched) -> None:
        """Tokens start for the host; the buffer is used again when `_READS` rounds have passed."""
        count = len(round.work.sampled_rows)
        self._reads.rotate(1)
        round.tokens = self._reads[0][:count]
        round.tokens.copy_(self._model.sampled[:count], non_blocking=True)

    def _boundary(self, tasks_left: int) -> list[Event]:
        """What must have ended before the next task may be queued."""
        if not self._boundaries:
            return []
        self._marks.append(DeviceEvent())
        return [self._marks[0]] if tasks_left > _LAST and len(self._marks) > _AHEAD else []


class _Prefills:
    """Attention of prompts, planned from pinned memory that an earlier round may still read: two
    of each kind take turns, each guarded by an event.
    """

    def __init__(self, model: DeviceModel) -> None:
        self._turns: dict[bool, deque[tuple[Prefill, list[DeviceEvent]]]] = {
            later: deque((model.maker.prefill(), []) for _ in range(2)) for later in (False, True)
        }

    def plan(self, work: GpuWork) -> list[tuple[int, int, Prefill]]:
        """(first token, end, attention) of each stretch of prompts."""
        planned = []
        for later, prompts in batches.same_kind([*work.hbm_prompts, *work.host_prompts]):
            turns = self._turns[later]
            turns.rotate(1)
            prefill, reader = turns[0]
            for event in reader:
                event.wait()  # two rounds ago: nearly never
            lens = [prompt.num_tokens for prompt in prompts]
            prefill.plan(lens, batches.paged_prompts(prompts) if later else None)
            reader[:] = [DeviceEvent()]
            planned.append((prompts[0].first, prompts[-1].first + lens[-1], prefill))
        return planned


def _has_ended(round: _Launched) -> bool:
    """Rounds that are still being queued have no end yet."""
    return not round.work.num_rows or (round.end is not None and round.end.is_done())
