"""Who leaves HBM: Appendix A.1.2, when the next tokens of all who decode there do not fit.

Works on the draft of a GPU round and knows nothing of prompts or swap-ins.
"""

from dualpace.block import blocks_for
from dualpace.runtime.schedule.draft import Draft
from dualpace.runtime.schedule.view import next_growth
from dualpace.runtime.types import Request


def restore_next_token_feasibility(draft: Draft) -> None:
    """A.1.2: make HBM hold every resident request's next token, by evicting from the tail.

    Enough victims: the others decode in this round and may take the victims' blocks. Some, not
    enough: a round of migrations only. None: the subset, in queue order, whose growth fits the
    free blocks; if that is empty, the youngest are dropped and recomputed until one can go on.
    """
    view = draft.view
    if draft.departures.migrate_every:
        send_those_due(draft)
        if draft.waits:
            return
    growth = next_growth(draft.queue)
    short = growth - draft.free - sum(len(r.blocks) for r in draft.round.swap_out)
    if short > 0 and (view.gpu_vacating or view.rounds_in_flight):
        draft.waits = True  # judged again when those copies, or the round in flight, are done
        return
    if short > 0:
        short = select_victims(draft, short)
        if short > 0 and draft.round.swap_out:
            draft.waits = True
            return
        growth = next_growth(draft.queue)
    draft.runnable = draft.queue
    if short > 0:
        draft.runnable = growth_that_fits(draft.queue, draft.free)
        if not draft.runnable:
            recompute_youngest(draft)
            growth = next_growth(draft.queue)
    draft.free -= growth


def select_victims(draft: Draft, short: int) -> int:
    """Chooses swap-outs from the tail, skipping requests that the host cannot take; returns what
    is still short.
    """
    for request in reversed(list(draft.queue)):
        if short <= 0:
            break
        if not request.ready:
            continue
        if swap_out(draft, request):
            short -= len(request.blocks) + request.next_growth
    return short


def swap_out(draft: Draft, request: Request) -> bool:
    """Whether the host has room for it, under Equation 2 too; then it leaves HBM."""
    blocks = blocks_for(request.kv_len)
    rest = [r for r in draft.queue if r is not request]
    peak = draft.peak - request.peak_blocks
    if (
        request.peak_blocks > draft.view.envelope.capacity
        or blocks > draft.host_free
        or blocks > draft.slack(draft.reserve(rest, peak))
    ):
        return False
    draft.round.swap_out.append(request)
    draft.queue, draft.peak = rest, peak
    draft.planned += blocks
    return True


def send_those_due(draft: Draft) -> None:
    """Beyond the appendix, to test moves: whoever has gained `migrate_every` tokens since it was
    last due leaves HBM, though it need not, if the host has room. It comes back by A.1.6, and with
    a token, so that it is not due again at once.
    """
    every = draft.departures.migrate_every
    due = [r for r in reversed(draft.queue) if (r.kv_len + r.order) % every == 0]
    if due and draft.view.rounds_in_flight:
        draft.waits = True  # they can be moved when it has been applied
        return
    for request in due:
        if request.ready:
            swap_out(draft, request)


def growth_that_fits(queue: list[Request], free: int) -> list[Request]:
    """The decodes, in queue order, whose next token fits in `free` blocks; those that need none
    always do.
    """
    chosen = []
    for request in queue:
        if request.next_growth <= free:
            free -= request.next_growth
            chosen.append(request)
    return chosen


def recompute_youngest(draft: Draft) -> None:
    """Beyond the appendix: no decode can grow and the host takes none, so drop from the tail
    until one can.
    """
    while not draft.runnable and draft.queue:
        victim = next((r for r in reversed(draft.queue) if r.ready), None)
        if victim is None:
            return
        drop(draft, victim)
        draft.runnable = growth_that_fits(draft.queue, draft.free)


def drop(draft: Draft, victim: Request) -> None:
    """Its blocks serve this round; its KV is computed again when it has waited its turn."""
    draft.free += len(victim.blocks)
    draft.round.preempt.append(victim)
    draft.queue = [r for r in draft.queue if r is not victim]
    draft.peak -= victim.peak_blocks
