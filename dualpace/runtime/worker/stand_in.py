"""Main rounds on the stand-in: torch on the CPU plays the accelerator, stage by stage.

What a GPU queues is computed at once here; only the copies run beside it, and the blockers that a
task yields are what a GPU's streams would wait for.
"""

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dualpace.graphs.executor import Stages
from dualpace.runtime.messages import GpuBatch, StepDone
from dualpace.runtime.worker.accelerator import Tasks
from dualpace.runtime.worker.activations import sampling_rows
from dualpace.runtime.worker.attention import AcceleratorAttention
from dualpace.runtime.worker.copies import CopyEvent, Event
from dualpace.runtime.worker.drawn import NOTHING, HostDrawn, on_host
from dualpace.runtime.worker.rows import GpuWork, gpu_work
from dualpace.runtime.worker.transfers import Staging, Transfers


@dataclass(slots=True)
class Sampled:
    """Where the last batch's tokens lie on the device, for rows that were scheduled before they
    were known.
    """

    tokens: Tensor | None = None
    index: dict[int, int] = field(default_factory=dict)  # request id -> entry of `tokens`


class StandInRounds:
    """Rounds of one batch after another; a step's result is there when its last task has run."""

    must_poll = False  # a copy that blocks the current batch rings the doorbell when it ends

    def __init__(
        self,
        stages: Stages,
        attention: AcceleratorAttention,
        transfers: Transfers,
        staging: Staging,
        num_layers: int,
        device: torch.device,
    ) -> None:
        self._stages = stages
        self._attention = attention
        self._transfers = transfers
        self._staging = staging
        self._num_layers = num_layers
        self._device = device
        self._sampled = Sampled()
        self._finished: list[tuple[StepDone, list[tuple[int, list[CopyEvent]]]]] = []

    def ready(self) -> None:
        self._stages.ready()

    def take_finished(self) -> list[StepDone]:
        """A transfer is never reported before the first token is."""
        finished, self._finished = self._finished, []
        for _, ends in finished:
            for transfer_id, events in ends:
                self._transfers.track(transfer_id, events)
        return [done for done, _ in finished]

    def tasks(self, batch: GpuBatch) -> Tasks:
        """Each step runs one stage task: pre-layer, every layer, post-layer."""
        started = time.monotonic()
        self._stages.begin_round()
        self.start_migrations(batch)
        work = gpu_work(batch)
        drawn = NOTHING
        ends: list[tuple[int, list[CopyEvent]]] = [(p.transfer_id, []) for p in work.host_prompts]
        if work.num_rows:
            x = self._stages.pre_layer(self.token_ids(work))
            positions = self._to_device(work.positions)
            self.begin(work)
            yield self.blockers_at_start(work)
            for layer in range(self._num_layers):
                x = self._layer(layer, x, positions, work, ends)
                yield self.blockers_of(work, layer + 1)
            drawn = self.sample(x, work)
        self.finish(work, started, drawn, ends)

    # ---- parts of a round, also for those that carry host rows (`lockstep`)

    def start_migrations(self, batch: GpuBatch) -> None:
        self._transfers.start_migrations(batch)

    def begin(self, work: GpuWork) -> None:
        self._attention.begin(work)

    def finish(
        self,
        work: GpuWork,
        started_s: float,
        drawn: HostDrawn,
        ends: list[tuple[int, list[CopyEvent]]],
    ) -> None:
        """`drawn` by row of the message; `ends`: layer-wise copies of each Prefill-to-CPU."""
        duration = time.monotonic() - started_s
        compiles = self._stages.compiles_after_ready
        told = drawn.asking, drawn.logprobs
        done = StepDone(work.step, started_s, duration, drawn.tokens, compiles, *told)
        self._finished.append((done, ends))

    def blockers_at_start(self, work: GpuWork) -> list[Event]:
        """From here on KV is read and written: not before the swaps have ended."""
        return [*self._transfers.migrations(), *self.blockers_of(work, 0)]

    def blockers_of(self, work: GpuWork, layer: int) -> list[Event]:
        """What must fire before `layer` may run: copies that still read its staging buffer."""
        if layer == self._num_layers or not work.host_prompts:
            return []
        return list(self._staging.readers(layer))

    def _layer(
        self,
        layer: int,
        x: Tensor,
        positions: Tensor,
        work: GpuWork,
        ends: list[tuple[int, list[CopyEvent]]],
    ) -> Tensor:
        q, k, v = self._stages.pre_attention(layer, x, positions)
        return self._stages.post_attention(layer, self.attend(layer, q, k, v, work, ends), x)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        work: GpuWork,
        ends: list[tuple[int, list[CopyEvent]]],
    ) -> Tensor:
        """Attention of the batch's own rows, their KV stored or on its way to the host."""
        if work.host_prompts:
            staged = slice(work.num_hbm_tokens, None)
            issued = self._staging.put(layer, k[staged], v[staged], work.host_prompts)
            for (_, events), event in zip(ends, issued, strict=True):
                events.append(event)
        return self._attention.run(layer, q, k, v)

    def token_ids(self, work: GpuWork) -> Tensor:
        token_ids = self._to_device(work.token_ids)
        if work.in_flight:
            assert self._sampled.tokens is not None
            places = torch.tensor([place for place, _ in work.in_flight])
            source = torch.tensor([self._sampled.index[request] for _, request in work.in_flight])
            token_ids[places] = self._sampled.tokens[source].long()
        return token_ids

    def sample(self, x: Tensor, work: GpuWork) -> HostDrawn:
        """By row of the message, of this batch's own rows."""
        if not len(work.sampled_rows):
            return NOTHING.among(work.num_rows, work.sampled_rows)
        last = x[self._to_device(work.last_tokens)]
        drawn = self._stages.draw(last, sampling_rows(work.sampling, self._device))
        index = {request: i for i, request in enumerate(work.sampled_ids.tolist())}
        self._sampled = Sampled(drawn.tokens, index)
        return on_host(drawn, work.sampling).among(work.num_rows, work.sampled_rows)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
