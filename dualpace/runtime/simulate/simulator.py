"""The virtual clock: arrivals, batch ends and copy reports as events, the real scheduler between.

Both engines run as they do live: each asks `State` for its next step when its device is free, and
the GPU loop asks once ahead while a step is in flight. Knows nothing about policies.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dualpace.runtime.bench.metrics import RequestRecord
from dualpace.runtime.bench.workload import RequestSpec
from dualpace.runtime.routing import Route
from dualpace.runtime.schedule.limits import RequestTooLong
from dualpace.runtime.schedule.rounds import (
    Applied,
    CpuStep,
    GpuStep,
)
from dualpace.runtime.schedule.state import State
from dualpace.runtime.simulate.cost import CostModel
from dualpace.runtime.simulate.devices import Cpu, Gpu, Link, Main
from dualpace.runtime.simulate.work import GpuWorkModel, kv_tokens
from dualpace.runtime.types import Request, RowKind, TransferKind

# Called at each apply: engine, step, what it did, route, start and duration in seconds.
RoundSink = Callable[[str, Applied, Route | None, float, float], None]


@dataclass(slots=True)
class Timeline:
    """Tokens of each applied round: time (s), all of them, those of host-resident requests."""

    t: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cpu_tokens: list[int] = field(default_factory=list)

    def add(self, t: float, tokens: int, cpu_tokens: int) -> None:
        self.t.append(t)
        self.tokens.append(tokens)
        self.cpu_tokens.append(cpu_tokens)


@dataclass(slots=True)
class Pauses:
    """How long host-resident requests were there and none gained a token (seconds)."""

    since_s: float | None = None  # None: nobody is there
    longest_s: float = 0.0
    long: list[tuple[float, float]] = field(default_factory=list)  # from, to: above one second

    def note(self, now: float, advanced: bool, resident: bool) -> None:
        """Called at every apply; a pause ends when the tier advances or empties."""
        if self.since_s is not None and (advanced or not resident):
            pause = now - self.since_s
            self.longest_s = max(self.longest_s, pause)
            if pause > 1.0:
                self.long.append((self.since_s, now))
            self.since_s = None
        if resident and self.since_s is None:
            self.since_s = now


class Simulation:
    """One run of a workload against a `State`. `run` may be called once.

    `route` places a CPU batch by its size; None if the policy runs no CPU engine.
    """

    def __init__(
        self,
        state: State,
        cost: CostModel,
        work: GpuWorkModel,
        requests: Sequence[RequestSpec],
        *,
        route: Callable[[int], Route] | None,
        on_round: RoundSink | None = None,
    ) -> None:
        self._state = state
        self._work = work
        self._arrivals = sorted(requests, key=lambda r: (r.arrival_s, r.id))
        self._arrived = 0
        self._context_limit = state.context_limit
        self._route = route
        self._on_round = on_round
        self._gpu_host_s = cost.profile.host.gpu_round_ms / 1e3
        self._cpu_host_s = cost.profile.host.cpu_round_ms / 1e3
        self.gpu = Gpu(cost)
        self.cpu = Cpu(cost, self.gpu)
        self.link = Link(cost)
        self._gpu_step: tuple[GpuStep, Main] | None = None
        self._ahead: GpuStep | None = None
        self._cpu_step: tuple[CpuStep, Route] | None = None
        self._copies: list[tuple[float, int]] = []  # heap of (done, transfer id)
        self._output_len: dict[int, int] = {}
        self._left = len(requests)
        self.now = 0.0
        self.records = {r.id: RequestRecord(r.id, r.arrival_s, r.prompt_len) for r in requests}
        self.requests: dict[int, Request] = {}
        self.timeline = Timeline()
        self.pauses = Pauses()
        self.rounds = {"gpu": 0, "cpu": 0}
        self.preemptions = 0

    def run(self) -> list[RequestRecord]:
        """Play the workload to its end; records in order of arrival."""
        while self._left:
            self._next_event()
            self._start_gpu()
            self._start_cpu()
            self._start_gpu()  # if it is still idle: the CPU may have yielded what it wants
        return [self.records[r.id] for r in self._arrivals]

    # Events

    def _next_event(self) -> None:
        """Move the clock to the next event and apply everything that happens there."""
        more = self._arrived < len(self._arrivals)
        arrival = self._arrivals[self._arrived].arrival_s if more else math.inf
        copy = self._copies[0][0] if self._copies else math.inf
        gpu = self._gpu_step[1].end_s if self._gpu_step else math.inf
        other = min(arrival, copy)
        iteration = self.cpu.iteration
        # Assists only move the end of the GPU's batch: no engine decides anything at them.
        while iteration is not None and iteration.next_s < min(other, gpu):
            self.now = iteration.next_s
            if self.cpu.advance():
                self._apply_cpu()
                return
            gpu = self._gpu_step[1].end_s if self._gpu_step else math.inf
        self.now = min(other, gpu, iteration.next_s if iteration else math.inf)
        assert math.isfinite(self.now), f"nothing can happen, {self._left} requests are left"
        if gpu <= self.now:
            self._apply_gpu()
        self._report_copies()
        self._admit_arrivals()
        if iteration is not None and iteration.next_s <= self.now and self.cpu.advance():
            self._apply_cpu()

    def _admit_arrivals(self) -> None:
        while self._arrived < len(self._arrivals):
            spec = self._arrivals[self._arrived]
            if spec.arrival_s > self.now:
                return
            self._arrived += 1
            room = max(self._context_limit - spec.prompt_len + 1, 1)  # else it is refused
            max_tokens = min(spec.max_tokens or room, room)
            request = Request(spec.id, spec.prompt_len, max_tokens, spec.arrival_s)
            self.requests[spec.id] = request
            self._output_len[spec.id] = min(spec.output_len, max_tokens)
            try:
                self._state.add(request)
            except RequestTooLong as error:
                self.records[spec.id].error = str(error)
                self._left -= 1

    def _report_copies(self) -> None:
        done = []
        while self._copies and self._copies[0][0] <= self.now:
            done.append(heapq.heappop(self._copies)[1])
        if done:
            self._state.transfer_done(done)

    # GPU engine

    def _start_gpu(self) -> None:
        if self._gpu_step is None:
            step, self._ahead = self._ahead, None
            prepared = step is not None
            step = step or self._state.schedule_gpu()
            if step is None:
                return
            self._submit(step, self.now if prepared else self.now + self._gpu_host_s)
            self._ahead = self._state.schedule_gpu()

    def _submit(self, step: GpuStep, at: float) -> None:
        start = at
        for transfer in step.transfers:
            if transfer.kind == TransferKind.SWAP_OUT:
                done = self.link.to_host(at, len(transfer.src_blocks))
            else:
                done = self.link.to_gpu(at, len(transfer.src_blocks))
            heapq.heappush(self._copies, (done, transfer.id))
            start = max(start, done)
        if step.rows or any(step.host_rows):
            on_host = bool(self._state.cpu_running or self._state.cpu_waiting)
            work = self._work.price(step, on_host)
            main = self.gpu.start(start, 0.0, work.layer_s, work.head_s)
        else:
            main = self.gpu.start(at, start - at, 0.0, 0.0)
        self._gpu_step = (step, main)

    def _apply_gpu(self) -> None:
        assert self._gpu_step is not None
        step, main = self._gpu_step
        self._gpu_step = None
        self.gpu.finish()
        for row in step.rows:
            if row.kind == RowKind.PREFILL_CPU:
                blocks = -(-row.context_len // 16)
                done = self.link.stream_to_host(main.first_layer_s, main.end_s, blocks)
                heapq.heappush(self._copies, (done, row.transfer_id))
        host = [row.request.id for rows in step.host_rows for row in rows]
        rows = [row.request for row in step.rows if row.sample]
        rows += [row.request for part in step.host_rows for row in part]
        applied = self._state.apply_gpu(step, self._finished(rows))
        self._record("gpu", applied, set(host))
        if self._on_round:
            self._on_round("gpu", applied, None, main.start_s, self.now - main.start_s)

    # CPU engine

    def _start_cpu(self) -> None:
        if self._cpu_step is not None or self._route is None:
            return
        step = self._state.schedule_cpu()
        if step is None:
            return
        route = self._route(len(step.rows)) if step.may_assist else Route.FULL_CPU
        self.cpu.start(self.now + self._cpu_host_s, len(step.rows), kv_tokens(step.rows), route)
        self._cpu_step = (step, route)

    def _apply_cpu(self) -> None:
        assert self._cpu_step is not None
        step, route = self._cpu_step
        self._cpu_step = None
        applied = self._state.apply_cpu(step, self._finished([r.request for r in step.rows]))
        self._record("cpu", applied, None)
        if self._on_round:
            start = self.cpu.last_start_s
            self._on_round("cpu", applied, route, start, self.now - start)

    # Both

    def _finished(self, requests: Sequence[Request]) -> set[int]:
        """Ids whose next token is their last."""
        length = self._output_len
        return {r.id for r in requests if r.num_output + 1 >= length[r.id]}

    def _record(self, engine: str, applied: Applied, host: set[int] | None) -> None:
        """Give each request that gained a token its time; with `host` None all are on the host."""
        now, records = self.now, self.records
        on_host = 0
        for request in applied.sampled:
            record = records[request.id]
            record.token_times_s.append(now)
            if host is None or request.id in host:
                record.cpu_tokens += 1
                on_host += 1
        if applied.sampled:
            self.timeline.add(now, len(applied.sampled), on_host)
        state = self._state
        self.pauses.note(now, on_host > 0, bool(state.cpu_running or state.cpu_waiting))
        self._left -= len(applied.finished)
        self.rounds[engine] += 1
        self.preemptions += len(applied.step.preempted)
