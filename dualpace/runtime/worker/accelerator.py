"""The GPU worker: main batches as FIFO stage tasks, a ready Dense Assist before each of them (paper
4.2, Figure 6).

The device's own matters lie behind `AcceleratorAttention`, `Transfers`, `Staging` and `CopyEvent`;
here is only the order in which things may happen. Knows nothing about requests beyond their ids in
a batch.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dualpace.graphs.executor import Stages
from dualpace.runtime.messages import GpuBatch, StepDone, TransfersDone
from dualpace.runtime.wiring import MAX_STEPS_IN_FLIGHT
from dualpace.runtime.worker.activations import sampling_rows
from dualpace.runtime.worker.assist_service import AssistService
from dualpace.runtime.worker.attention import AcceleratorAttention
from dualpace.runtime.worker.copies import CopyEvent, all_done
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.rows import GpuWork, gpu_work
from dualpace.runtime.worker.transfers import Staging, Transfers

MAX_TRANSFERS_A_MESSAGE = 4096

Tasks = Iterator[
    list[CopyEvent]
]  # runs to the next boundary; yields what must fire before it goes on


@dataclass(slots=True)
class Sampled:
    """Where the last batch's tokens lie on the device, for rows that were scheduled before they
    were known.
    """

    tokens: Tensor | None = None
    index: dict[int, int] = field(default_factory=dict)  # request id -> entry of `tokens`


class AcceleratorWorker:
    """One accelerator and its batches. `turn` is one look around and at most one stage task."""

    def __init__(
        self,
        link: Link,
        stages: Stages,
        attention: AcceleratorAttention,
        transfers: Transfers,
        staging: Staging,
        assists: AssistService | None,
        num_layers: int,
        device: torch.device,
    ) -> None:
        self._link = link
        self._stages = stages
        self._attention = attention
        self._transfers = transfers
        self._staging = staging
        self._assists = assists  # None where no CPU batch can ever ask: whole-forward mode
        self._num_layers = num_layers
        self._device = device
        self._batches: deque[GpuBatch] = deque()
        self._tasks: Tasks | None = None
        self._blockers: list[CopyEvent] = []
        self._sampled = Sampled()

    @torch.inference_mode()
    def turn(self) -> None:
        """Waits unless there is work, serves a ready assist, then runs one main task.

        Raises LifelineClosedError.
        """
        self._link.wait(block=not self._can_go_on())
        self._receive()
        if self._assists is not None:
            self._assists.serve()
            self._run_task()
        else:
            while self._can_go_on():  # no boundary to check: the whole forward at once
                self._run_task()
        self._report_transfers()  # last: a copy that ends from now on rings the doorbell

    def _can_go_on(self) -> bool:
        """A copy that blocks the current batch rings the doorbell when it ends."""
        return bool(self._tasks or self._batches) and all_done(self._blockers)

    def _receive(self) -> None:
        for message in self._link.receive():
            assert isinstance(message, GpuBatch)
            self._batches.append(message)
        outstanding = len(self._batches) + (self._tasks is not None)
        assert outstanding <= MAX_STEPS_IN_FLIGHT, f"{outstanding} batches outstanding"

    def _report_transfers(self) -> None:
        ended = np.array(self._transfers.take_ended(), np.int64)
        for start in range(0, len(ended), MAX_TRANSFERS_A_MESSAGE):
            self._link.send(TransfersDone(ended[start : start + MAX_TRANSFERS_A_MESSAGE]))

    def _run_task(self) -> None:
        if not self._can_go_on():
            return
        if self._tasks is None:
            self._tasks = self._stage_tasks(self._batches.popleft())
        try:
            self._blockers = next(self._tasks)
        except StopIteration:
            self._tasks, self._blockers = None, []

    # ---- one batch

    def _stage_tasks(self, batch: GpuBatch) -> Tasks:
        """Each step runs one stage task: pre-layer, every layer, post-layer."""
        started = time.monotonic()
        self._transfers.start_migrations(batch)
        work = gpu_work(batch)
        tokens = np.full(work.num_rows, -1, np.int32)
        ends: list[tuple[int, list[CopyEvent]]] = [(p.transfer_id, []) for p in work.host_prompts]
        if work.num_rows:
            x = self._stages.pre_layer(self._token_ids(work))
            positions = self._to_device(work.positions)
            self._attention.begin(work)
            # From here on KV is read and written: not before the swaps have ended.
            yield [*self._transfers.migrations(), *self._blockers_of(work, 0)]
            for layer in range(self._num_layers):
                x = self._layer(layer, x, positions, work, ends)
                yield self._blockers_of(work, layer + 1)
            tokens[work.sampled_rows] = self._sample(x, work)
        duration = time.monotonic() - started
        compiles = self._stages.compiles_after_ready
        self._link.send(StepDone(work.step, started, duration, tokens, compiles))
        for transfer_id, events in ends:  # never reported before the first token is
            self._transfers.track(transfer_id, events)

    def _blockers_of(self, work: GpuWork, layer: int) -> list[CopyEvent]:
        """What must fire before `layer` may run: copies that still read its staging buffer."""
        if layer == self._num_layers or not work.host_prompts:
            return []
        return self._staging.readers(layer)

    def _layer(
        self,
        layer: int,
        x: Tensor,
        positions: Tensor,
        work: GpuWork,
        ends: list[tuple[int, list[CopyEvent]]],
    ) -> Tensor:
        q, k, v = self._stages.pre_attention(layer, x, positions)
        if work.host_prompts:
            staged = slice(work.num_hbm_tokens, None)
            issued = self._staging.put(layer, k[staged], v[staged], work.host_prompts)
            for (_, events), event in zip(ends, issued, strict=True):
                events.append(event)
        attention = self._attention.run(layer, q, k, v)
        return self._stages.post_attention(layer, attention, x)

    def _token_ids(self, work: GpuWork) -> Tensor:
        token_ids = self._to_device(work.token_ids)
        if work.in_flight:
            assert self._sampled.tokens is not None
            places = torch.tensor([place for place, _ in work.in_flight])
            source = torch.tensor([self._sampled.index[request] for _, request in work.in_flight])
            token_ids[places] = self._sampled.tokens[source].long()
        return token_ids

    def _sample(self, x: Tensor, work: GpuWork) -> np.ndarray:
        if not len(work.sampled_rows):
            return np.empty(0, np.int32)
        last = x[self._to_device(work.last_tokens)]
        tokens = self._stages.post_layer(last, sampling_rows(work.sampling, self._device))
        index = {request: i for i, request in enumerate(work.sampled_ids.tolist())}
        self._sampled = Sampled(tokens, index)
        return tokens.cpu().numpy()

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
