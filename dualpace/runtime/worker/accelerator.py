"""The GPU worker: main batches as FIFO stage tasks, a ready Dense Assist before each of them (paper
4.2, Figure 6).

The device's own matters lie behind `Rounds`, `Assists` and `Transfers`: the stand-in's compute at
once, a GPU's are queued and end later. Here is only the order in which things may happen. Knows
nothing about requests beyond their ids in a batch.
"""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from dualpace.runtime.messages import GpuBatch, StepDone, TransfersDone
from dualpace.runtime.order import TASK, Decision, OrderFollower, OrderLeader
from dualpace.runtime.wiring import MAX_STEPS_IN_FLIGHT
from dualpace.runtime.worker.copies import Event, all_done
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.move_checks import MoveChecks

MAX_TRANSFERS_A_MESSAGE = 4096

# Runs to the next boundary; yields what must have ended before it goes on.
Tasks = Iterator[list[Event]]


class Pollable(Protocol):
    """`must_poll`: something is outstanding that ends without ringing the doorbell."""

    @property
    def must_poll(self) -> bool: ...


class Rounds(Pollable, Protocol):
    """How a device runs main batches, one after another."""

    def ready(self) -> None:
        """All is built and warm."""

    def tasks(self, batch: GpuBatch) -> Tasks:
        """Each step runs, or queues, one stage task of the batch."""

    def take_finished(self) -> list[StepDone]:
        """Batches whose tokens have reached the host since the last call, in order."""


class Assists(Pollable, Protocol):
    """How a device serves Dense Assist. `are_expected`: one may well come while a round runs, so
    that boundaries are worth a look."""

    @property
    def are_expected(self) -> bool: ...

    def serve(self) -> bool:
        """Takes a ready assist, or answers one that has run; whether there was one."""

    def follow(self, decision: Decision) -> None:
        """Takes part in an assist that another rank serves."""


class Transfers(Pollable, Protocol):
    """The copies that a device has been given. `checks`: a debug mode that looks at each block
    they have moved; None: it is off.
    """

    @property
    def checks(self) -> MoveChecks | None: ...

    def take_ended(self) -> list[int]:
        """Ids of transfers that have ended since the last call."""


class AcceleratorWorker:
    """One accelerator and its batches. `turn` is one look around and at most one stage task."""

    def __init__(
        self,
        link: Link,
        rounds: Rounds,
        transfers: Transfers,
        assists: Assists | None,
        order: OrderLeader | None = None,
    ) -> None:
        self._link = link
        self._rounds = rounds
        self._transfers = transfers
        self._assists = assists  # None where no CPU batch can ever ask
        self._order = order  # of the other ranks, where this one decides between tasks and assists
        self._batches: deque[GpuBatch] = deque()
        self._tasks: Tasks | None = None
        self._blockers: list[Event] = []

    def ready(self) -> None:
        """Whatever is compiled from now on is a defect."""
        self._rounds.ready()

    @torch.inference_mode()
    def turn(self) -> None:
        """Waits unless there is work, serves a ready assist, then runs one main task.

        Raises LifelineClosedError.
        """
        self._link.wait(block=not (self._can_go_on() or self._must_poll()))
        self._receive()
        if self._assists is not None:
            self._assists.serve()
        if self._assists is not None and self._assists.are_expected:
            self._run_task()
        else:
            while self._can_go_on():  # no boundary to check: the whole forward at once
                self._run_task()
                self._report_rounds()
        self._report_rounds()
        self._report_transfers()  # last: a copy that ends from now on rings the doorbell

    def _can_go_on(self) -> bool:
        return bool(self._tasks or self._batches) and all_done(self._blockers)

    def _must_poll(self) -> bool:
        assists = self._assists
        return (
            self._rounds.must_poll
            or self._transfers.must_poll
            or (assists is not None and assists.must_poll)
        )

    def _receive(self) -> None:
        for message in self._link.receive():
            assert isinstance(message, GpuBatch)
            self._batches.append(message)
        outstanding = len(self._batches) + (self._tasks is not None)
        # Another rank than the first may be behind by batches that compute nothing.
        assert outstanding <= MAX_STEPS_IN_FLIGHT or self._link.rank, f"{outstanding} batches"

    def _report_rounds(self) -> None:
        """Also while the next one is being queued, which may take longer than the round before it
        runs: the engine schedules the one after that meanwhile."""
        for done in self._rounds.take_finished():
            self._link.send(done)

    def _report_transfers(self) -> None:
        ended = np.array(self._transfers.take_ended(), np.int64)
        if len(ended) and (checks := self._transfers.checks) is not None:
            self._link.send(checks.compare(ended.tolist()))  # while the engine knows whose they are
        for start in range(0, len(ended), MAX_TRANSFERS_A_MESSAGE):
            self._link.send(TransfersDone(ended[start : start + MAX_TRANSFERS_A_MESSAGE]))

    def _run_task(self) -> None:
        if not self._can_go_on():
            return
        if self._order is not None:
            self._order.say(Decision(TASK))
        if self._tasks is None:
            self._tasks = self._rounds.tasks(self._batches.popleft())
        try:
            self._blockers = next(self._tasks)
        except StopIteration:
            self._tasks, self._blockers = None, []


class FollowerWorker(AcceleratorWorker):
    """Another rank than the first, which decides what comes next where assists are served."""

    def __init__(
        self,
        link: Link,
        rounds: Rounds,
        transfers: Transfers,
        assists: Assists,
        decisions: OrderFollower,
    ) -> None:
        super().__init__(link, rounds, transfers, assists)
        self._decisions = decisions
        self._next: Decision | None = None

    @torch.inference_mode()
    def turn(self) -> None:
        """Waits for a decision, and for what a task needs here; then carries it out."""
        self._look()
        self._link.wait(block=not (self._is_next_ready() or self._must_poll()))
        self._receive()
        self._look()
        if self._is_next_ready():
            self._carry_out()
        for _ in self._rounds.take_finished():
            pass  # the first rank reports them
        self._report_transfers()

    def _is_next_ready(self) -> bool:
        """Its batch may be on its way still, or a copy of this rank's be in the way."""
        return self._next is not None and (not self._next.is_task or self._can_go_on())

    def _look(self) -> None:
        if self._next is None:
            self._next = self._decisions.next()

    def _carry_out(self) -> None:
        decision, self._next = self._next, None
        assert decision is not None and self._assists is not None
        if decision.is_task:
            self._run_task()
        else:
            self._assists.follow(decision)
