"""Rounds with host rows in lockstep (NEO, paper 3.1, Figure 4), on both workers.

Sub-batch 0 travels with the prompts and the HBM-resident decodes, sub-batch 1 by itself. In a layer
the CPU attends to sub-batch 0 while the accelerator runs its own attention and sub-batch 1's dense
stages, and to sub-batch 1 while sub-batch 0's dense stages run.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualpace.cpu.append import kv_append
from dualpace.graphs.executor import Stages
from dualpace.runtime.assist import AssistLostError
from dualpace.runtime.kv.overlaps import Overlap
from dualpace.runtime.lockstep import SUB_BATCHES, tag
from dualpace.runtime.messages import GpuBatch, StepDone
from dualpace.runtime.worker.accelerator import Tasks
from dualpace.runtime.worker.activations import sampling_rows
from dualpace.runtime.worker.attention import DecodeAttention
from dualpace.runtime.worker.copies import CopyEvent, Event
from dualpace.runtime.worker.drawn import NOTHING, HostDrawn, joined, on_host
from dualpace.runtime.worker.exchange import Exchange
from dualpace.runtime.worker.kv_pools import HostPool
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.rows import CpuWork, gpu_work, host_work, num_own_rows
from dualpace.runtime.worker.stand_in import StandInRounds

_LOOKS = 200  # at a word between two of the link, which is a system call


@dataclass(slots=True, frozen=True)
class Answered:
    """The event that the CPU worker has attended to one layer of a sub-batch; it rings."""

    exchange: Exchange
    place: int
    number: int

    def is_done(self) -> bool:
        exchange = self.exchange
        return exchange.buffer.is_answered(self.place, self.number, exchange.hosts)


@dataclass(slots=True)
class SubBatch:
    """Host rows on the accelerator, between its stages."""

    place: int
    work: CpuWork
    answer: Event | None = None

    def __len__(self) -> int:
        return len(self.work)


class LockstepRounds:
    """The stand-in's rounds, some of which carry host rows."""

    must_poll = False

    def __init__(
        self, rounds: StandInRounds, stages: Stages, link: Link, exchange: Exchange, layers: int
    ) -> None:
        self._rounds = rounds
        self._stages = stages
        self._exchange = exchange
        self._bells = [link.other_doorbells[host] for host in exchange.hosts]
        self._num_layers = layers

    def ready(self) -> None:
        self._rounds.ready()

    def take_finished(self) -> list[StepDone]:
        return self._rounds.take_finished()

    def tasks(self, batch: GpuBatch) -> Tasks:
        """A batch without host rows runs as ever."""
        if num_own_rows(batch) == len(batch.kinds):
            return self._rounds.tasks(batch)
        first, second = host_work(batch)
        return self._mixed(batch, SubBatch(0, first), SubBatch(1, second))

    def _mixed(self, batch: GpuBatch, first: SubBatch, second: SubBatch) -> Tasks:
        started = time.monotonic()
        main = self._rounds
        self._stages.begin_round()
        main.start_migrations(batch)
        work = gpu_work(batch)
        num_main = len(work.token_ids)
        ends: list[tuple[int, list[CopyEvent]]] = [(p.transfer_id, []) for p in work.host_prompts]
        ids = torch.cat([main.token_ids(work), torch.from_numpy(first.work.token_ids)])
        places = np.concatenate([work.positions, first.work.positions])
        x, positions = self._stages.pre_layer(ids), torch.from_numpy(places)
        y = self._start(second)
        main.begin(work)
        yield main.blockers_at_start(work)
        for layer in range(self._num_layers):
            q, k, v = self._stages.pre_attention(layer, x, positions)
            self._ask(first, batch.step, layer, q[num_main:], k[num_main:], v[num_main:])
            parts = []
            if num_main:
                own_q, own_k, own_v = q[:num_main], k[:num_main], v[:num_main]
                parts.append(main.attend(layer, own_q, own_k, own_v, work, ends))
            if y is not None:
                yield self._blockers(second)
                if layer:
                    y = self._stages.post_attention(layer - 1, self._out(second), y)
                qkv = self._stages.pre_attention(layer, y, torch.from_numpy(second.work.positions))
                self._ask(second, batch.step, layer, *qkv)
            yield [*self._blockers(first), *main.blockers_of(work, layer + 1)]
            x = self._stages.post_attention(layer, torch.cat([*parts, self._out(first)]), x)
        yield self._blockers(second)
        if y is not None:
            y = self._stages.post_attention(self._num_layers - 1, self._out(second), y)
        drawn = [main.sample(x, work), self._draw(first, x[num_main:])]
        if y is not None:
            drawn.append(self._draw(second, y))
        main.finish(work, started, joined(drawn), ends)

    def _start(self, batch: SubBatch) -> Tensor | None:
        return self._stages.pre_layer(torch.from_numpy(batch.work.token_ids)) if batch else None

    def _ask(self, batch: SubBatch, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        rows, place = len(batch), batch.place
        if not rows:
            return
        exchange, number = self._exchange, tag(step, layer, self._num_layers)
        for shared, part in ((exchange.q, q), (exchange.k, k), (exchange.v, v)):
            shared[place][:rows] = part
        exchange.buffer.ask(place, number, self._bells, exchange.rank)
        batch.answer = Answered(exchange, place, number)

    def _blockers(self, batch: SubBatch) -> list[Event]:
        return [] if batch.answer is None else [batch.answer]

    def _out(self, batch: SubBatch) -> Tensor:
        """Attention of the layer that was answered last, [rows, N * D]."""
        return self._exchange.out[batch.place][: len(batch)].flatten(1)

    def _draw(self, batch: SubBatch, x: Tensor) -> HostDrawn:
        if not len(batch):
            return NOTHING
        sampling = batch.work.sampling
        return on_host(self._stages.draw(x, sampling_rows(sampling)), sampling)


class HeadGroup:
    """Heads that this CPU rank and one accelerator rank have in common: their part of the pool, and
    of what is handed to and fro.
    """

    def __init__(
        self, pool: HostPool, exchange: Exchange, common: Overlap, num_threads: int
    ) -> None:
        """common: KV heads, `own` in the pool and `theirs` in the exchange."""
        self.exchange = exchange
        self.layers = [cache[:, :, common.own] for cache in pool.layers]
        group = exchange.q[0].shape[1] // exchange.k[0].shape[1]  # query heads of a KV head
        kv, num_kv_heads = common.theirs, self.layers[0].shape[2]
        self._q, self._kv = slice(group * kv.start, group * kv.stop), kv
        self._attentions = [  # one a sub-batch: each has a plan of its own
            DecodeAttention(self.layers, group * num_kv_heads, num_threads)
            for _ in range(SUB_BATCHES)
        ]

    def begin(self, place: int, work: CpuWork) -> "_Part":
        """For the layers of one sub-batch."""
        self._attentions[place].begin(work.decodes)
        exchange, rows = self.exchange, len(work)
        q, out = (part[place][:rows, self._q] for part in (exchange.q, exchange.out))
        k, v = (part[place][:rows, self._kv] for part in (exchange.k, exchange.v))
        slots = torch.from_numpy(work.decodes.slots)
        return _Part(self, self._attentions[place], q, k, v, out, slots)


@dataclass(slots=True, frozen=True)
class _Part:
    """One sub-batch's tensors of some heads, the same for all layers."""

    heads: HeadGroup
    attention: DecodeAttention
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    slots: Tensor

    def run(self, layer: int) -> None:
        kv_append(self.k, self.v, self.heads.layers[layer], self.slots)
        self.attention.run(layer, self.q, self.out)


class AttentionWorker:
    """The CPU worker where the accelerator's rounds carry host rows: their K/V writes and
    attention, layer by layer, as asked; no dense work, so its ranks need not know of each other.
    """

    def __init__(
        self, link: Link, groups: Sequence[HeadGroup], num_layers: int, is_rung: bool
    ) -> None:
        """`groups`: this rank's heads, by the accelerator rank that asks for them. `is_rung`:
        whoever asks and is answered rings, and is rung; a device writes and watches words alone, so
        during a round this worker polls."""
        self._link = link
        self._groups = groups
        self._num_layers = num_layers
        self._buffer = groups[0].exchange.buffer
        self._looks = 1 if is_rung else _LOOKS
        askers = [group.exchange.rank for group in groups]
        self._bells = [link.other_doorbells[asker] for asker in askers] if is_rung else []

    def ready(self) -> None:
        """Kernels are warm; nothing else is compiled."""

    @torch.inference_mode()
    def turn(self) -> None:
        """Raises LifelineClosedError."""
        self._link.wait(block=True)
        for batch in self._link.receive():
            assert isinstance(batch, GpuBatch)
            with contextlib.suppress(AssistLostError):  # the engine has voided the round
                self._serve(batch)

    def _serve(self, batch: GpuBatch) -> None:
        """Returns when all layers of both sub-batches are answered. Raises AssistLostError when
        the accelerator's worker has been lost.
        """
        sub_batches = {
            place: [heads.begin(place, work) for heads in self._groups]
            for place, work in enumerate(host_work(batch))
            if len(work)
        }
        for layer in range(self._num_layers):
            number = tag(batch.step, layer, self._num_layers)
            for place, parts in sub_batches.items():
                for part in parts:
                    self._wait_asked(place, number, part.heads.exchange.rank, batch.epoch)
                    part.run(layer)
                self._buffer.answer(place, number, self._bells, self._link.rank)

    def _wait_asked(self, place: int, number: int, asker: int, epoch: int) -> None:
        buffer = self._buffer
        while not any(buffer.is_asked(place, number, asker) for _ in range(self._looks)):
            if self._link.assist.epoch != epoch:
                raise AssistLostError
            self._link.wait(block=bool(self._bells))
