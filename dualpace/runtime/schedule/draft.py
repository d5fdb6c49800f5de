"""A GPU round in the making: what it has decided and what the next candidate is judged by.

The budgets of Appendix A.1 in one place; which of them bind whom is `gpu_round`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dualpace.block import blocks_for
from dualpace.runtime.schedule.envelope import migration_reserve
from dualpace.runtime.schedule.rounds import GpuRound
from dualpace.runtime.schedule.view import View
from dualpace.runtime.types import Request


class HostAdmission(Protocol):
    """Whom the host takes of those that it has room for, and whether the GPU helps it."""

    def takes_prompt(self, draft: Draft, request: Request, outputs: int) -> bool:
        """Whether a prompt, `outputs` tokens expected, should not wait for HBM."""

    def lets_assist(self, view: View, rows: int) -> bool:
        """Whether the GPU may be asked for dense stages of so many host rows."""

    def calls_home(self, draft: Draft) -> bool:
        """Whether those on the host come back on a prompt's terms, without a promise of HBM to
        their end.
        """


@dataclass(frozen=True, slots=True)
class Departures:
    """Where a policy departs from Appendix A; by default nowhere."""

    chunk_prompts: bool = False  # prompts for HBM are cut at the soft token limit
    host_admission: HostAdmission | None = None  # None: the host takes whoever fits
    migrate_every: int = 0  # tokens after which a decode leaves HBM; 0: when it has to


PAPER = Departures()


class Draft:
    """A round in the making: the decision, and the budgets that the next candidate is judged by."""

    def __init__(self, view: View, departures: Departures = PAPER) -> None:
        self.view = view
        self.departures = departures
        self.round = GpuRound()
        self.queue = list(view.gpu_running)  # Q_G after the decisions so far, arrival order
        self.runnable: list[Request] = []  # decodes whose next token fits
        self.waits = False  # nothing but the swap-outs chosen may happen in this round
        self.rows = self.tokens = self.staged = 0
        self.free = view.gpu_free  # HBM blocks left after all decodes' next tokens and admissions
        self.planned = 0  # host blocks of this round's swap-outs and host prompts
        self.peak = view.gpu_peak  # Equation 4: of the queue and of a prompt in progress
        self.migration = view.envelope.migration  # the reserve for the queue, from A.1.3 on
        self.marked_rows = self.marked_blocks = 0  # what marks reserve
        self.cpu_promise = idle_cpu_promise(view)
        self.calls_home = False  # swap-ins on a prompt's terms; decided once victims are

    @property
    def host_free(self) -> int:
        """Host blocks that nobody has."""
        return self.view.host_free - self.planned

    def slack(self, migration: int) -> int:
        """Host blocks left under Equation 2 with the decisions so far and that reserve."""
        return self.view.envelope.slack + self.view.envelope.migration - self.planned - migration

    def reserve(self, queue: list[Request], peak: int) -> int:
        """The migration reserve (Equation 4) for that queue."""
        return migration_reserve(reversed(queue), peak, self.view.gpu_capacity)

    def has_room_for_optional_row(self) -> bool:
        """The row limit and the soft token limit leave room for one more row beside the marked
        ones.
        """
        limits = self.view.limits
        return (
            self.rows + self.marked_rows < limits.gpu_rows
            and self.tokens + self.marked_rows < limits.soft_tokens
        )

    def takes_home(self, request: Request) -> bool:
        """A swap-in's two tests: its next token fits now, and its finish peak beside all others'
        for good. One that is called home may have to leave again, as a prompt may: its peak need
        only fit alone, but a block more for everybody is free now, and Equation 2 holds with it
        among the evictable.
        """
        next_token, free = blocks_for(request.kv_len + 1), self.free - self.marked_blocks
        peak = self.peak + request.peak_blocks
        for_good = peak + self.marked_blocks <= self.view.gpu_capacity
        alone = request.peak_blocks <= self.view.gpu_capacity  # else it would drive out all others
        if for_good or not (self.calls_home and alone):
            return for_good and next_token <= free
        migration = self.reserve(in_arrival_order(self.queue, request), peak)
        return next_token + len(self.queue) <= free and self.slack(migration) >= self.cpu_promise

    def reserve_mark(self, request: Request) -> None:
        """A mark takes a row, a token and the finish peak out of the budgets, or the blocks that it
        needs now if it is called home; it changes no ownership.
        """
        self.marked_rows += 1
        self.marked_blocks += self._mark_blocks(request)

    def release_mark(self, request: Request) -> None:
        self.marked_rows -= 1
        self.marked_blocks -= self._mark_blocks(request)

    def _mark_blocks(self, request: Request) -> int:
        return blocks_for(request.kv_len + 1) if self.calls_home else request.peak_blocks


def idle_cpu_promise(view: View) -> int:
    """Beyond the appendix: host blocks that admissions leave for the head of an idle CPU tier to
    finish.

    Growth (Equation 3) counts running requests only; without this, prompts could fill the host,
    or keep the reserve high, for ever while the CPU's first request finds no room to grow.
    """
    if view.cpu_running or not view.cpu_waiting:
        return 0
    return view.cpu_waiting[0].finish_growth


def in_arrival_order(queue: list[Request], request: Request) -> list[Request]:
    """The queue with the request at its place; a recomputed one may be older than the tail."""
    place = len(queue)
    while place and queue[place - 1].order > request.order:
        place -= 1
    return [*queue[:place], request, *queue[place:]]
