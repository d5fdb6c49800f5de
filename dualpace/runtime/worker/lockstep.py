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
from dualpace.runtime.lockstep import SUB_BATCHES, LockstepBuffer, tag
from dualpace.runtime.messages import GpuBatch, StepDone
from dualpace.runtime.worker.accelerator import Tasks
from dualpace.runtime.worker.activations import sampling_rows
from dualpace.runtime.worker.attention import DecodeAttention
from dualpace.runtime.worker.copies import CopyEvent, Event
from dualpace.runtime.worker.kv_pools import HostPool
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.rows import CpuWork, gpu_work, host_work, num_own_rows
from dualpace.runtime.worker.stand_in import StandInRounds

_LOOKS = 200  # at a word between two of the link, which is a system call


class Exchange:
    """Tensors of the shared buffer by sub-batch: q, out [rows, N, D], k, v [rows, K, D]."""

    def __init__(self, buffer: LockstepBuffer, head_dim: int, dtype: torch.dtype) -> None:
        self.buffer = buffer
        rows = buffer.layout.max_rows

        def views(name: str, width: int) -> list[Tensor]:
            count = rows * width
            return [
                torch.frombuffer(buffer.bytes_of(place, name), dtype=dtype, count=count).view(
                    rows, -1, head_dim
                )
                for place in range(SUB_BATCHES)
            ]

        self.q, self.out = (views(name, buffer.layout.q_width) for name in ("q", "out"))
        self.k, self.v = (views(name, buffer.layout.kv_width) for name in ("k", "v"))


@dataclass(slots=True, frozen=True)
class Answered:
    """The event that the CPU worker has attended to one layer of a sub-batch; it rings."""

    buffer: LockstepBuffer
    place: int
    number: int

    def is_done(self) -> bool:
        return self.buffer.is_answered(self.place, self.number)


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
        self._link = link
        self._exchange = exchange
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
        tokens = np.full(work.num_rows, -1, np.int32)
        tokens[work.sampled_rows] = main.sample(x, work)
        host = [self._tokens(first, x[num_main:])]
        if y is not None:
            host.append(self._tokens(second, y))
        main.finish(work, started, np.concatenate([tokens, *host]), ends)

    def _start(self, batch: SubBatch) -> Tensor | None:
        return self._stages.pre_layer(torch.from_numpy(batch.work.token_ids)) if batch else None

    def _ask(self, batch: SubBatch, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        rows, place = len(batch), batch.place
        if not rows:
            return
        exchange, number = self._exchange, tag(step, layer, self._num_layers)
        for shared, part in ((exchange.q, q), (exchange.k, k), (exchange.v, v)):
            shared[place][:rows] = part
        exchange.buffer.ask(place, number, self._link.other_doorbell)
        batch.answer = Answered(exchange.buffer, place, number)

    def _blockers(self, batch: SubBatch) -> list[Event]:
        return [] if batch.answer is None else [batch.answer]

    def _out(self, batch: SubBatch) -> Tensor:
        """Attention of the layer that was answered last, [rows, N * D]."""
        return self._exchange.out[batch.place][: len(batch)].flatten(1)

    def _tokens(self, batch: SubBatch, x: Tensor) -> np.ndarray:
        if not len(batch):
            return np.empty(0, np.int32)
        return self._stages.post_layer(x, sampling_rows(batch.work.sampling)).numpy()


class AttentionWorker:
    """The CPU worker where the accelerator's rounds carry host rows: their K/V writes and
    attention, layer by layer, as asked; no dense work.
    """

    def __init__(
        self,
        link: Link,
        pool: HostPool,
        exchange: Exchange,
        attentions: Sequence[DecodeAttention],
        is_rung: bool,
    ) -> None:
        """`is_rung`: whoever asks and is answered rings, and is rung; a device writes and watches
        words alone, so during a round this worker polls."""
        self._link = link
        self._layers = pool.layers
        self._exchange = exchange
        self._attentions = attentions  # one a sub-batch: each has a plan of its own
        self._looks = 1 if is_rung else _LOOKS
        self._bell = link.other_doorbell if is_rung else None

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
        parts = [
            self._begin(place, work) for place, work in enumerate(host_work(batch)) if len(work)
        ]
        num_layers = len(self._layers)
        for layer, cache in enumerate(self._layers):
            for part in parts:
                number = tag(batch.step, layer, num_layers)
                self._wait_asked(part.place, number, batch.epoch)
                kv_append(part.k, part.v, cache, part.slots)
                self._attentions[part.place].run(layer, part.q, part.out)
                self._exchange.buffer.answer(part.place, number, self._bell)

    def _begin(self, place: int, work: CpuWork) -> "_Part":
        self._attentions[place].begin(work.decodes)
        exchange, rows = self._exchange, len(work)
        q, k, v, out = (
            part[place][:rows] for part in (exchange.q, exchange.k, exchange.v, exchange.out)
        )
        return _Part(place, q, k, v, out, torch.from_numpy(work.decodes.slots))

    def _wait_asked(self, place: int, number: int, epoch: int) -> None:
        buffer = self._exchange.buffer
        while not any(buffer.is_asked(place, number) for _ in range(self._looks)):
            if self._link.assist.epoch != epoch:
                raise AssistLostError
            self._link.wait(block=self._bell is not None)


@dataclass(slots=True, frozen=True)
class _Part:
    """One sub-batch's tensors, the same for all layers."""

    place: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    slots: Tensor
