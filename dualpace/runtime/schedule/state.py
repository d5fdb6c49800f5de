"""The scheduling core: queues, both block pools, rounds and copies in flight, and the only verbs
that change them.

Engine, simulator and tests drive this one machine. It knows no device, clock or token text, never
waits and never fails on load: a verb that cannot act now returns None, and the caller tries again
after any other verb has run.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable

from dualpace.runtime.kv.pool import BlockPool
from dualpace.runtime.schedule.apply import apply_rows, outgrow_if_due
from dualpace.runtime.schedule.commit import commit_cpu, commit_gpu
from dualpace.runtime.schedule.envelope import (
    HostEnvelope,
    finish_growth,
    migration_reserve,
)
from dualpace.runtime.schedule.estimate import Declared, Estimator
from dualpace.runtime.schedule.integrity import check
from dualpace.runtime.schedule.limits import Limits
from dualpace.runtime.schedule.loss import lose_cpu, lose_gpu
from dualpace.runtime.schedule.policies import Policy
from dualpace.runtime.schedule.rounds import (
    Applied,
    CpuStep,
    GpuStep,
    Snapshot,
    Transfer,
    TransferKind,
)
from dualpace.runtime.schedule.view import View
from dualpace.runtime.types import Owner, Phase, Request


class State:
    """All requests that are not finished, and where they are.

    `gpu_blocks` and `host_blocks` are pool sizes in blocks, scratch block 0 included.
    """

    def __init__(
        self,
        limits: Limits,
        gpu_blocks: int,
        host_blocks: int,
        policy: Policy,
        estimator: Estimator | None = None,
        look_ahead: bool = False,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.estimator: Estimator = estimator if estimator is not None else Declared()
        self.look_ahead = look_ahead
        self.gpu_pool = BlockPool(gpu_blocks)
        self.host_pool = BlockPool(host_blocks if policy.uses_host else 0)

        self.requests: dict[int, Request] = {}  # everyone who has not ended
        self.waiting: deque[Request] = deque()  # arrival order, a prompt in progress at the head
        self.gpu_running: list[Request] = []  # arrival order
        self.cpu_waiting: deque[Request] = deque()
        self.cpu_running: list[Request] = []
        self.marked: list[Request] = []
        self.ending: dict[int, Request] = {}  # reach max_tokens with a GPU round in flight
        self.lingering: dict[int, Request] = {}  # ended, blocks still touched by rounds or copies

        self.gpu_in_flight: deque[GpuStep] = deque()  # two at most
        self.cpu_in_flight: CpuStep | None = None
        self.transfers: dict[int, Transfer] = {}  # outstanding
        self.staging: set[int] = set()  # outstanding Prefill-to-CPU transfers
        self.planned = 0  # host blocks that outstanding copies write
        self.gpu_vacating = 0  # HBM blocks that outstanding swap-outs read
        self.queue_peak = 0  # summed finish peaks of `gpu_running`
        self._growth: int | None = 0  # Equation 3, None when it must be counted again
        self.changes = 0  # rises whenever a round changes what the other engine decides by
        self.preempted_gpu: list[int] = []  # not yet in a step's record
        self.preempted_cpu: list[int] = []
        self.gpu_rounds = self.cpu_rounds = 0
        self._num_added = self._num_transfers = 0

    # requests

    @property
    def context_limit(self) -> int:
        """Tokens of KV that one request may reach: `prompt_len + max_tokens - 1` at most."""
        return self.limits.context_limit(self.gpu_pool.capacity, self._host_alone)

    @property
    def _host_alone(self) -> int:
        """Host blocks that one request may count on without HBM."""
        return self.host_pool.capacity if self.policy.has_cpu_engine else 0

    @property
    def idle(self) -> bool:
        """Nobody is left and nothing is in flight."""
        in_flight = self.gpu_in_flight or self.cpu_in_flight or self.transfers
        return not (self.requests or self.lingering or in_flight)

    def add(self, request: Request) -> None:
        """Joins the tail of waiting. Raises RequestTooLong if it could never finish here."""
        assert request.id not in self.requests, f"request {request.id} is already here"
        self.limits.admit_length(
            request.prompt_len, request.max_tokens, self.gpu_pool.capacity, self._host_alone
        )
        request.order = self._num_added
        self._num_added += 1
        self.requests[request.id] = request
        self.waiting.append(request)

    def cancel(self, request_id: int) -> bool:
        """Ends a request in any state; its blocks are freed when nothing in flight touches them.

        False if it has ended already.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.end(request)
        return True

    # the GPU engine

    def schedule_gpu(self) -> GpuStep | None:
        """Decides and commits the next GPU round, or a round ahead of the one in flight; None if
        none is due.
        """
        while self._may_schedule_gpu():
            self._project()
            decision = self.policy.gpu_round(self.view())
            if self.gpu_in_flight and decision.exclusive:
                return None
            step = commit_gpu(self, decision)
            if not decision.decodes_only:
                self.changes += 1
            if step is not None:
                self.gpu_in_flight.append(step)
                return step
            if not decision.preempt:
                return None
        return None

    def _may_schedule_gpu(self) -> bool:
        if not self.gpu_in_flight:
            return True
        if not self.look_ahead or len(self.gpu_in_flight) == 2 or self.gpu_in_flight[0].exclusive:
            return False
        return not any(row.request.needs_last_token for row in self.gpu_in_flight[0].rows)

    def _project(self) -> None:
        """Estimates as they will be when the round in flight has run and ended nobody."""
        for step in self.gpu_in_flight:
            for request in step.due:
                outgrow_if_due(self, request)

    def apply_gpu(self, step: GpuStep, finished: Collection[int]) -> Applied:
        """Applies the oldest GPU step in flight: each row that sampled gained one token.

        `finished` are ids that end with their token (EOS or stop); rows at max_tokens end by
        themselves.
        """
        assert self.gpu_in_flight and self.gpu_in_flight[0] is step, "steps are applied in order"
        self.gpu_in_flight.popleft()
        self.end_lockstep(step)
        rows = [*step.rows, *step.host_rows[0], *step.host_rows[1]]
        return apply_rows(self, step, rows, finished)

    def end_lockstep(self, step: GpuStep) -> None:
        """Host rows of a GPU step (neo) are CPU-running for that step only."""
        if any(step.host_rows):
            self.cpu_waiting.extendleft(reversed(self.cpu_running))
            self.set_cpu_running([])

    # the CPU engine

    def schedule_cpu(self) -> CpuStep | None:
        """Decides and commits the next CPU round; None if one is in flight or there is nothing to
        run now.
        """
        if self.cpu_in_flight is not None or not self.policy.has_cpu_engine:
            return None
        while True:
            decision = self.policy.cpu_round(self.view())
            self.cpu_in_flight = commit_cpu(self, decision)
            if not decision.decodes_only:
                self.changes += 1
            if self.cpu_in_flight or not (decision.displaced or decision.preempt):
                return self.cpu_in_flight

    def apply_cpu(self, step: CpuStep, finished: Collection[int]) -> Applied:
        """Applies the CPU step in flight, as apply_gpu does."""
        assert self.cpu_in_flight is step, "this CPU step is not in flight"
        self.cpu_in_flight = None
        return apply_rows(self, step, step.rows, finished)

    # copies

    def start_transfer(
        self,
        request: Request,
        kind: TransferKind,
        source: list[int],
        target: list[int],
        held: list[int],
    ) -> Transfer:
        """Registers a copy that pins the request until it is reported."""
        self._num_transfers += 1
        transfer = Transfer(self._num_transfers, request, kind, source, target, held)
        self.transfers[transfer.id] = transfer
        request.pins += 1
        return transfer

    def transfer_done(self, transfer_ids: Iterable[int]) -> None:
        """Reports copies whose last event has fired. Reports of a lost worker's copies are void."""
        for transfer_id in transfer_ids:
            assert 0 < transfer_id <= self._num_transfers, f"copy {transfer_id} was never started"
            transfer = self.transfers.pop(transfer_id, None)
            if transfer is None:
                continue  # voided by lose_gpu
            self.retire(transfer)
            self.release_if_unpinned(transfer.request)

    def retire(self, transfer: Transfer) -> None:
        """Unpins the request, frees the source, and counts the destination as materialized."""
        transfer.request.pins -= 1
        if transfer.kind is TransferKind.SWAP_IN:
            self.host_pool.free(transfer.held)
            return
        self.planned -= len(transfer.dst_blocks)
        self.gpu_pool.free(transfer.held)
        self.gpu_vacating -= len(transfer.held)
        self.staging.discard(transfer.id)

    # lost workers

    def lose_gpu(self) -> list[Request]:
        """The GPU worker died: HBM, its steps in flight and all outstanding copies are void.

        Whoever had KV in HBM, a row in a GPU step or a copy in flight is recomputed from the
        front of waiting; returns them in arrival order. Host rows of a step (neo) keep their KV
        and run again.
        """
        return lose_gpu(self)

    def lose_cpu(self) -> None:
        """The CPU worker died: its step is void and is scheduled again. Host KV outlives it."""
        lose_cpu(self)

    # queues

    def join_gpu_queue(self, request: Request) -> None:
        """Puts a decode at its place in arrival order."""
        insort(self.gpu_running, request, key=_order)
        self.queue_peak += request.peak_blocks

    def _in_gpu_queue(self, request: Request) -> bool:
        place = bisect_left(self.gpu_running, request.order, key=_order)
        return place < len(self.gpu_running) and self.gpu_running[place] is request

    def leave_gpu_queue(self, request: Request) -> None:
        place = bisect_left(self.gpu_running, request.order, key=_order)
        assert self.gpu_running[place] is request
        del self.gpu_running[place]
        self.queue_peak -= request.peak_blocks
        self.changes += 1  # the reserve may have fallen

    def set_cpu_running(self, requests: list[Request]) -> None:
        self.cpu_running = requests
        self.recount_growth()

    def recount_growth(self) -> None:
        """Somebody has joined or left CPU running, got a block or a new finish peak there."""
        self._growth = None

    def unmark(self, request: Request) -> None:
        if request.marked:
            request.marked = False
            self.marked.remove(request)

    def recompute(self, request: Request, by: list[int]) -> None:
        """Drops the KV of a request in no queue but the GPU's; back to waiting, by arrival.

        `by` is the record of the engine that drops it. The prompt in progress keeps the head:
        it holds blocks that anybody before it may be waiting for.
        """
        assert request.ready, f"request {request.id} is touched by something in flight"
        if request.id not in by:
            by.append(request.id)
        if self._in_gpu_queue(request):
            self.leave_gpu_queue(request)
        self.unmark(request)
        self._free_blocks(request)
        request.kv_len = 0
        request.phase, request.owner = Phase.WAITING, Owner.GPU
        request.num_preemptions += 1
        place = 1 if self.waiting and self.waiting[0].blocks else 0
        while place < len(self.waiting) and self.waiting[place].order < request.order:
            place += 1
        self.waiting.insert(place, request)

    def end(self, request: Request) -> None:
        """It leaves its queue; its blocks go when nothing in flight touches them."""
        self.leave_queues(request)
        self.unmark(request)
        del self.requests[request.id]
        request.phase = Phase.ENDED
        self.lingering[request.id] = request
        self.release_if_unpinned(request)

    def leave_queues(self, request: Request) -> None:
        if self.ending.pop(request.id, None):
            return
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.owner is Owner.GPU:
            self.leave_gpu_queue(request)
        elif request in self.cpu_running:
            self.cpu_running.remove(request)
            self.recount_growth()
        else:
            self.cpu_waiting.remove(request)

    def release_if_unpinned(self, request: Request) -> None:
        if request.phase is Phase.ENDED and request.ready and request.id in self.lingering:
            del self.lingering[request.id]
            self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        (self.gpu_pool if request.owner is Owner.GPU else self.host_pool).free(request.blocks)
        request.blocks = []

    # what others may read

    @property
    def gpu_peak(self) -> int:
        """Equation 4: summed finish peaks of the GPU-owned requests, a prompt in progress too."""
        partial = self.waiting[0].peak_blocks if self.waiting and self.waiting[0].blocks else 0
        return self.queue_peak + partial

    @property
    def growth(self) -> int:
        """Equation 3: what the CPU-running requests may still need."""
        if self._growth is None:
            self._growth = finish_growth(self.cpu_running)
        return self._growth

    @property
    def envelope(self) -> HostEnvelope:
        """Equation 2 as it stands: the CPU reads the reserve here, so it is never out of date."""
        peak = self.gpu_peak
        return HostEnvelope(
            capacity=self.host_pool.capacity,
            used=self.host_pool.num_used - self.planned,
            planned=self.planned,
            growth=self.growth,
            migration=migration_reserve(reversed(self.gpu_running), peak, self.gpu_pool.capacity),
        )

    def view(self) -> View:
        """The window that policies decide by."""
        return View(
            limits=self.limits,
            waiting=self.waiting,
            gpu_running=self.gpu_running,
            cpu_waiting=self.cpu_waiting,
            cpu_running=self.cpu_running,
            marked=self.marked,
            gpu_capacity=self.gpu_pool.capacity,
            gpu_free=self.gpu_pool.num_free,
            gpu_peak=self.gpu_peak,
            gpu_vacating=self.gpu_vacating,
            host_free=self.host_pool.num_free,
            envelope=self.envelope,
            rounds_in_flight=len(self.gpu_in_flight),
            transfers_in_flight=len(self.transfers),
            staging_busy=bool(self.staging),
            estimate=self.estimator.estimate,
        )

    def snapshot(self) -> Snapshot:
        """The counts of the round log."""
        return Snapshot(
            gpu_capacity=self.gpu_pool.capacity,
            gpu_used=self.gpu_pool.num_used,
            host=self.envelope,
            waiting=len(self.waiting),
            gpu_running=len(self.gpu_running),
            cpu_waiting=len(self.cpu_waiting),
            cpu_running=len(self.cpu_running),
        )

    def check(self) -> None:
        """Proves the invariants of pools and queues, or AssertionError. Slow: idle time, tests."""
        check(self)


def _order(request: Request) -> int:
    return request.order
