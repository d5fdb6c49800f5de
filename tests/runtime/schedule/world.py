"""A whole serving world in miniature: requests with secret lengths, a fake device, and every rule
checked after every event. Random tests and the state machine drive it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from dualpace.runtime.schedule import (
    Applied,
    CpuStep,
    GpuStep,
    Limits,
    RequestTooLong,
    RowKind,
    State,
    TransferKind,
)
from dualpace.runtime.schedule.estimate import Declared, Estimator
from dualpace.runtime.schedule.policies import Policy
from dualpace.runtime.types import Owner, Phase, Request
from tests.runtime.schedule.fake_device import FakeDevice

STALL_CYCLES = 8  # fair cycles that may pass without a token or a chunk


@dataclass
class World:
    """`lengths` are the outputs after which requests end by EOS."""

    state: State
    lengths: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)  # at any time
    rounds: int = 0
    work: int = 0  # tokens sampled and chunks computed
    unpromised: int = 0  # rounds that took somebody home into HBM that all may outgrow
    reuse: dict[int, tuple[set[int], set[int]]] = field(default_factory=dict)
    """Outstanding swap-out -> (HBM blocks that it reads, requests that may take them already)."""

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.state)

    @classmethod
    def make(
        cls,
        policy: Policy,
        gpu: int,
        host: int,
        limits: Limits,
        estimator: Estimator | None = None,
        look_ahead: bool = False,
    ) -> "World":
        """Pools in usable blocks."""
        estimator = estimator or Declared()
        return cls(State(limits, gpu + 1, host + 1, policy, estimator, look_ahead))

    # What may happen

    def arrive(
        self, prompt_len: int, max_tokens: int, length: int, **options: bool
    ) -> Request | None:
        """None if it was refused; then nothing has changed."""
        request = Request(len(self.lengths), prompt_len, max_tokens, **options)
        self.lengths[request.id] = min(length, max_tokens)
        try:
            self.state.add(request)
        except RequestTooLong:
            assert prompt_len + max_tokens - 1 > self.state.context_limit
            self.cancelled.add(request.id)
            return None
        self.tokens[request.id] = 0
        self.check()
        return request

    def schedule_gpu(self) -> bool:
        state = self.state
        ready = {r.id for r in state.cpu_waiting if r.ready}
        ahead = bool(self.device.steps)
        suspects = {r.id for r in state.gpu_suspects}
        step = state.schedule_gpu()
        if step is not None:
            self.rounds += 1
            self.check_gpu_step(step, ready, ahead, suspects)
            self.device.submit(step)
        self.check()
        return step is not None

    def execute(self) -> bool:
        if self.device.executed == len(self.device.steps):
            return False
        self.device.execute()
        return True

    def apply_gpu(self) -> bool:
        if not self.device.executed:
            return False
        step = self.device.steps.pop(0)
        self.device.executed -= 1
        rows = [*step.rows, *step.host_rows[0], *step.host_rows[1]]
        self.work += len(rows)
        for transfer in step.transfers:  # the batch has run, so what it took was copied before
            if transfer.id in self.reuse:
                self.reuse[transfer.id] = (set(transfer.held), set())
        applied = self.state.apply_gpu(step, self.ending([r.request for r in rows if r.sample]))
        self.count(applied)
        return True

    def schedule_cpu(self) -> bool:
        if self.device.cpu_step is not None:
            return False
        state = self.state
        running, waiting = list(state.cpu_running), list(state.cpu_waiting)
        suspects = set(state.on_probation)
        step = state.schedule_cpu()
        self.device.cpu_step = step
        if step is not None:
            self.rounds += 1
            assert step.snapshot.host.holds, "runs beyond Equation 2"
            if not (len(step.rows) == 1 and step.rows[0].request.id in suspects):
                self.check_cpu_step(step, running, waiting)
        self.check()
        return step is not None

    def apply_cpu(self) -> bool:
        step = self.device.cpu_step
        if step is None:
            return False
        self.device.run_cpu()
        self.device.cpu_step = None
        self.work += len(step.rows)
        self.count(self.state.apply_cpu(step, self.ending([r.request for r in step.rows])))
        return True

    def report(self, ids: Sequence[int]) -> bool:
        self.device.report(list(ids))
        for copy_id in ids:
            self.reuse.pop(copy_id, None)
        self.check()
        return bool(ids)

    def cancel(self, request_id: int) -> None:
        if self.state.cancel(request_id):
            self.cancelled.add(request_id)
        self.check()

    def fail(self, worker: Owner) -> None:
        """It is lost by its own fault; the culprit, if there is one, is given up."""
        if (culprit := self.state.accuse(worker)) is not None:
            assert culprit.id in self.suspects, "somebody was given up at once"
            self.cancel(culprit.id)
        self.suspects |= set(self.state.on_probation)
        self.check()
        if worker is Owner.GPU or not self.state.policy.has_cpu_engine:
            self.lose_gpu()
        else:
            self.lose_cpu()

    def lose_gpu(self) -> None:
        lost = self.state.lose_gpu()
        assert [r.order for r in lost] == sorted(r.order for r in lost)
        fresh = [r for r in self.state.waiting if r in lost]
        assert fresh == list(self.state.waiting)[: len(fresh)] or any(
            r.num_preemptions for r in self.state.waiting
        )
        assert not self.state.gpu_running and self.state.gpu_pool.num_used == 0
        self.device.die()
        self.reuse.clear()
        self.check()

    def lose_cpu(self) -> None:
        self.state.lose_cpu()
        self.device.cpu_step = None
        self.check()

    # What must hold

    def ending(self, requests: list[Request]) -> set[int]:
        """Those whose next token is EOS. Requests that have ended already may be named again."""
        return {r.id for r in requests if self.tokens[r.id] + 1 >= self.lengths[r.id]}

    def count(self, applied: Applied) -> None:
        for request in applied.sampled:
            self.tokens[request.id] += 1
            assert self.tokens[request.id] == request.num_output <= self.lengths[request.id]
        for request in applied.dropped:
            ended = self.tokens[request.id] == self.lengths[request.id]
            assert ended or request.id in self.cancelled
        assert not {r.id for r in applied.dropped} & set(applied.batch)
        self.check()

    def check(self) -> None:
        """Pools, ownership, counts, Equation 2; and blocks that a swap-out vacates stay with its
        round.
        """
        self.state.check()
        if self.reuse:
            for request in self.state.requests.values():
                if request.owner is Owner.GPU and request.blocks:
                    held = set(request.blocks)
                    for blocks, allowed in self.reuse.values():
                        assert request.id in allowed or not held & blocks, "taken before the report"

    def check_gpu_step(
        self, step: GpuStep, ready: set[int], ahead: bool, suspects: set[int]
    ) -> None:
        limits, rows = self.state.limits, step.rows
        kinds = [row.kind for row in rows]
        tokens = [row.num_tokens for row in rows]
        assert kinds == sorted(kinds) and len({row.request.id for row in rows}) == len(rows)
        assert len(rows) <= limits.gpu_rows and sum(tokens) <= limits.hard_tokens
        prompts = [row for row in rows if row.kind is not RowKind.DECODE]
        if prompts:
            before_last = sum(tokens) - prompts[-1].num_tokens
            assert before_last < limits.soft_tokens, "more than one prompt crosses the soft limit"
        staged = [row for row in rows if row.kind is RowKind.PREFILL_CPU]
        assert sum(row.num_tokens for row in staged) <= limits.staging
        assert all(row.start == 0 and row.sample for row in staged), "a host prompt is one forward"
        fresh = [row.request.order for row in prompts if row.start == 0]
        assert fresh == sorted(fresh), "later prompts may not pass, nor change the destination back"
        passed = [r.order for r in self.state.waiting if not r.blocks]
        is_trial = len(rows) == 1 and rows[0].request.id in suspects
        in_order = not fresh or not passed or max(fresh) < min(passed)
        assert in_order or is_trial, "prompts are not in FIFO order"
        assert not (suspects and ahead), "a suspect may be alone in its round, not on the device"
        assert not (step.swap_in and step.swap_out)
        assert set(step.swap_in) <= ready, "an unready request was swapped in"
        if ahead:
            assert not (step.prefill_cpu or step.swap_in or step.swap_out or step.preempted)
        if self.state.policy.guards_host and (fresh or step.swap_out):
            assert step.snapshot.host.holds, "admitted beyond Equation 2"
        promised = self.state.gpu_peak <= step.snapshot.gpu_capacity
        if self.state.policy.guards_host and step.swap_in and not promised:
            assert step.snapshot.host.holds, "called home beyond Equation 2"
            self.unpromised += 1
        decoding = {row.request.id for row in rows if row.kind is RowKind.DECODE}
        for transfer in step.transfers:
            if transfer.kind is TransferKind.SWAP_OUT:
                assert transfer.request.id not in decoding
                self.reuse[transfer.id] = (set(transfer.held) | set(transfer.src_blocks), decoding)

    def check_cpu_step(self, step: CpuStep, running: list[Request], waiting: list[Request]) -> None:
        batch = [row.request for row in step.rows]
        assert len(batch) <= self.state.limits.cpu_rows
        assert all(not r.marked for r in batch), "a marked request runs on the CPU"
        kept = [r for r in batch if r in running]
        assert kept == [r for r in running if r in kept], "running requests changed places"
        admitted = [r for r in batch if r not in running]
        stay = [r for r in waiting if r.phase is not Phase.WAITING]
        assert admitted == stay[: len(admitted)], "not the FIFO prefix of waiting"
        if admitted:
            assert len(kept) == len(running), "somebody older was admitted while others left"

    # To the end

    def cycle(self) -> None:
        """Everything in flight ends and both engines schedule: nobody is starved by the world."""
        while self.execute() or self.apply_gpu():
            pass
        self.report(self.device.reportable())
        self.schedule_gpu()
        self.schedule_gpu()
        self.schedule_cpu()
        self.apply_cpu()

    def drain(self) -> None:
        """Runs to the end in bounded time; then everyone alive has all tokens and both pools are
        empty.
        """
        state = self.state
        ahead = sum(r.prompt_len + 2 * r.max_tokens for r in state.requests.values())
        bound = 60 + 4 * ahead
        stalled = cycles = 0
        while not state.idle:
            before = self.work
            self.cycle()
            stalled = 0 if self.work > before else stalled + 1
            cycles += 1
            assert stalled < STALL_CYCLES, f"nobody moves: {state.snapshot()}"
            assert cycles < bound, f"still busy after {cycles} cycles: {state.snapshot()}"
        assert state.gpu_pool.num_used == state.host_pool.num_used == 0
        assert state.planned == state.gpu_vacating == 0 and not state.marked
        for request, length in self.lengths.items():
            if request not in self.cancelled:
                assert self.tokens[request] == length

    def shuffle(self, rng: random.Random, events: int) -> None:
        """Events in random order and pace."""
        for _ in range(events):
            happens = rng.random()
            if happens < 0.25:
                self.schedule_gpu()
            elif happens < 0.4:
                self.execute()
            elif happens < 0.6:
                self.apply_gpu()
            elif happens < 0.7:
                self.schedule_cpu()
            elif happens < 0.8:
                self.apply_cpu()
            else:
                done = self.device.reportable()
                self.report(rng.sample(done, rng.randint(0, len(done))))
