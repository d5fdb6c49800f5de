"""The scheduling core: the ledger, and the only verbs that change it.

Engine, simulator and tests drive this one machine. It knows no device, clock or token text, never
waits and never fails on load: a verb that cannot act now returns None, and the caller tries again
after any other verb has run.
"""

from collections.abc import Collection, Iterable

from dualpace.runtime.schedule.apply import apply_rows, outgrow_if_due
from dualpace.runtime.schedule.commit import commit_cpu, commit_gpu
from dualpace.runtime.schedule.estimate import Declared, Estimator
from dualpace.runtime.schedule.integrity import check
from dualpace.runtime.schedule.ledger import Ledger
from dualpace.runtime.schedule.limits import Limits, context_limit
from dualpace.runtime.schedule.loss import lose_cpu, lose_gpu
from dualpace.runtime.schedule.policies import Policy
from dualpace.runtime.schedule.probation import (
    accuse,
    cpu_round_alone,
    gpu_round_alone,
    tried_by_cpu,
    tried_by_gpu,
)
from dualpace.runtime.schedule.rounds import Applied, CpuRound, CpuStep, GpuRound, GpuStep
from dualpace.runtime.schedule.view import View
from dualpace.runtime.types import Owner, Request


class State(Ledger):
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
        super().__init__(gpu_blocks, host_blocks if policy.uses_host else 0)
        self.limits = limits
        self.policy = policy
        self.estimator: Estimator = estimator if estimator is not None else Declared()
        self.look_ahead = look_ahead
        self._num_added = 0

    # requests

    @property
    def context_limit(self) -> int:
        """Tokens of KV that one request may reach: `prompt_len + max_tokens - 1` at most."""
        return context_limit(self.gpu_pool.capacity, self._host_alone, self.limits.host_prompt)

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
            decision = self._decide_gpu()
            if self.gpu_in_flight and not decision.may_follow(self.gpu_in_flight[0]):
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

    def _decide_gpu(self) -> GpuRound:
        view, suspects = self.view(), self.gpu_suspects
        alone = gpu_round_alone(view, self.policy, suspects) if suspects else None
        return alone or self.policy.gpu_round(view)

    @property
    def gpu_suspects(self) -> list[Request]:
        """Who has to run alone on the GPU worker, assists included, before others do."""
        suspects = self.on_probation
        return tried_by_gpu(self.policy, suspects.values()) if suspects else []

    def _may_schedule_gpu(self) -> bool:
        if self.gpu_suspects:
            return not (self.gpu_in_flight or self.transfers)
        if not self.gpu_in_flight:
            return True
        if not self.look_ahead or len(self.gpu_in_flight) == 2 or self.gpu_in_flight[0].exclusive:
            return False
        return not any(row.request.needs_last_token for row in self.gpu_in_flight[0].rows)

    def _project(self) -> None:
        """Estimates as they will be when the round in flight has run and ended nobody."""
        for step in self.gpu_in_flight:
            for request in step.due:
                outgrow_if_due(self, request, self.estimator)

    def apply_gpu(self, step: GpuStep, finished: Collection[int]) -> Applied:
        """Applies the oldest GPU step in flight: each row that sampled gained one token.

        `finished` are ids that end with their token (EOS or stop); rows at max_tokens end by
        themselves.
        """
        assert self.gpu_in_flight and self.gpu_in_flight[0] is step, "steps are applied in order"
        self.gpu_in_flight.popleft()
        self.end_lockstep(step)
        return apply_rows(self, step, finished, self.estimator)

    # the CPU engine

    def schedule_cpu(self) -> CpuStep | None:
        """Decides and commits the next CPU round; None if one is in flight or there is nothing to
        run now.
        """
        if self.cpu_in_flight is not None or not self.policy.has_cpu_engine:
            return None
        while True:
            decision = self._decide_cpu()
            self.cpu_in_flight = commit_cpu(self, decision)
            if not decision.decodes_only:
                self.changes += 1
            if self.cpu_in_flight or not (decision.displaced or decision.preempt):
                return self.cpu_in_flight

    def _decide_cpu(self) -> CpuRound:
        view, suspects = self.view(), self.on_probation
        alone = cpu_round_alone(view, tried_by_cpu(suspects.values())) if suspects else None
        return alone or self.policy.cpu_round(view)

    def apply_cpu(self, step: CpuStep, finished: Collection[int]) -> Applied:
        """Applies the CPU step in flight, as apply_gpu does."""
        assert self.cpu_in_flight is step, "this CPU step is not in flight"
        self.cpu_in_flight = None
        return apply_rows(self, step, finished, self.estimator)

    # copies

    def transfer_done(self, transfer_ids: Iterable[int]) -> None:
        """Reports copies whose last event has fired. Reports of a lost worker's copies are void."""
        for transfer_id in transfer_ids:
            assert 0 < transfer_id <= self._num_transfers, f"copy {transfer_id} was never started"
            transfer = self.transfers.pop(transfer_id, None)
            if transfer is None:
                continue  # voided by lose_gpu
            self.retire(transfer)
            self.release_if_unpinned(transfer.request)

    # lost workers

    def accuse(self, worker: Owner, was_assisting: bool = False) -> Request | None:
        """The worker of that side is lost by its own fault. Returns whose row it cannot survive,
        if that is proven: give it up. Else whoever was in its rounds runs alone next. Before
        `lose_gpu` or `lose_cpu`. `was_assisting`: it ran something for the other side too.
        """
        return accuse(self, worker, was_assisting)

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

    # what others may read

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

    def check(self) -> None:
        """Proves the invariants of pools and queues, or AssertionError. Slow: idle time, tests."""
        check(self)
        if self.policy.guards_host and self.estimator.exact:
            assert self.envelope.holds, f"Equation 2 is broken: {self.envelope}"
