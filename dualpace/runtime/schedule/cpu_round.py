"""One CPU scheduling round: Appendix A.2, paragraph by paragraph, as pure functions of a view.

Knows no policy of the GPU engine beyond the migration reserve that it has published. `State`
commits the result.
"""

from dualpace.runtime.schedule.rounds import CpuRound
from dualpace.runtime.schedule.view import View, next_growth
from dualpace.runtime.types import Request


def cpu_round(view: View) -> CpuRound:
    """Decides one round of the CPU engine under the dualpace policy."""
    draft = Draft(view)  # A.2.1
    preserve_running_frontier(draft)  # A.2.2
    if not draft.round.displaced:
        admit_ready_prefix(draft)  # A.2.3
        if not draft.round.decode:
            wait_or_make_room(draft)  # A.2.4
    return draft.round  # A.2.5: State commits it


class Draft:
    """A.2.1: an empty batch and the budgets that the next candidate is judged by."""

    __slots__ = ("free", "max_rows", "round", "slack", "view")

    def __init__(self, view: View) -> None:
        self.view = view
        self.round = CpuRound()
        self.max_rows = min(view.limits.cpu_rows, view.limits.hard_tokens)  # one token a row
        self.free = view.host_free  # for immediate next-token blocks
        self.slack = view.envelope.slack + view.envelope.growth  # for the batch's finish growth

    def take(self, request: Request) -> bool:
        """Adds the request if rows, tokens, its next block, its finish growth and the reserve
        allow it.
        """
        if (
            len(self.round.decode) >= self.max_rows
            or request.next_growth > self.free
            or request.finish_growth > self.slack
        ):
            return False
        self.round.decode.append(request)
        self.free -= request.next_growth
        self.slack -= request.finish_growth
        return True


def preserve_running_frontier(draft: Draft) -> None:
    """A.2.2: running requests stay in FIFO order until a budget ends; marked ones yield.

    Those that yield and the suffix behind a boundary go to the front of waiting, and then nobody
    older is admitted in this round.
    """
    if keeps_everyone(draft):
        return
    at_boundary = False
    for request in draft.view.cpu_running:
        if request.marked or at_boundary or not draft.take(request):
            at_boundary = at_boundary or not request.marked
            draft.round.displaced.append(request)


def keeps_everyone(draft: Draft) -> bool:
    """The usual case of A.2.2 at once: nobody yields, and the budgets hold the whole queue."""
    view, running = draft.view, draft.view.cpu_running
    growth = next_growth(running)
    fits = len(running) <= draft.max_rows and growth <= draft.free
    if view.marked or not fits or view.envelope.growth > draft.slack:
        return False
    draft.round.decode = list(running)
    draft.free -= growth
    draft.slack -= view.envelope.growth
    return True


def admit_ready_prefix(draft: Draft) -> None:
    """A.2.3: the ready FIFO prefix of waiting; an unready request, or one yielded to the GPU,
    ends it.
    """
    for request in draft.view.cpu_waiting:
        if not request.ready or request.marked or not draft.take(request):
            return
        draft.round.admitted += 1


def wait_or_make_room(draft: Draft) -> None:
    """A.2.4: with an unready head, or short of the migration reserve alone, the engine waits.

    Beyond the appendix: a ready head that would not fit even without the reserve can wait for
    nobody when no copy is in flight and HBM cannot promise it room. Then the youngest behind it
    are dropped, to be recomputed, until it can run.
    """
    view = draft.view
    head = view.cpu_waiting[0] if view.cpu_waiting else None
    if head is None or not head.ready or head.marked or view.transfers_in_flight:
        return
    slack, free = draft.slack + view.envelope.migration, draft.free
    if head.finish_growth <= slack and head.next_growth <= free:
        return  # only the reserve is in the way
    if view.hbm_unpromised >= head.peak_blocks or head.peak_blocks > view.envelope.capacity:
        return  # A.1.6 takes it, now or when the GPU's own have ended
    for request in reversed(view.cpu_waiting):
        if head.finish_growth <= slack and head.next_growth <= free:
            break
        if request is not head and request.ready:
            draft.round.preempt.append(request)
            slack += len(request.blocks)
            free += len(request.blocks)
