"""One GPU scheduling round: Appendix A.1, paragraph by paragraph, as pure functions of a view.

Read it beside the paper. `gpu_round` lists the paragraphs; each function is one of them, here or in
`evictions` and `prefills`, and works on a `Draft`: the decision so far with what it has left to
spend. Nothing touches a queue, a pool or a device: `State` commits the result.
"""

from dualpace.block import blocks_for
from dualpace.runtime.schedule.draft import PAPER, Departures, Draft, in_arrival_order
from dualpace.runtime.schedule.evictions import restore_next_token_feasibility
from dualpace.runtime.schedule.prefills import admit_prefills
from dualpace.runtime.schedule.rounds import GpuRound
from dualpace.runtime.schedule.view import View


def gpu_round(view: View, departures: Departures = PAPER) -> GpuRound:
    """Decides one round of the GPU engine under the dualpace policy."""
    draft = Draft(view, departures)
    if not transfer_safe_frontier(view):  # A.1.1
        return draft.round
    restore_next_token_feasibility(draft)  # A.1.2
    reserve_future_evictions(draft)  # A.1.3
    if not draft.waits:
        draft.calls_home = calls_home(draft)
        admit_decodes(draft)  # A.1.4
        relieve_saturated_cpu_tier(draft)
        admit_prefills(draft)  # A.1.5
        use_residual_hbm(draft)  # A.1.6
    return draft.round  # A.1.7: State commits it


# A.1.1


def transfer_safe_frontier(view: View) -> bool:
    """A.1.1: the Prefill-to-CPU copies of the round before have drained, so staging may be
    written again.

    Transfers are retired by `State.transfer_done`; until it reports these, nothing is
    schedulable.
    """
    return not view.staging_busy


# A.1.3


def reserve_future_evictions(draft: Draft) -> None:
    """A.1.3: the host reserve for the remaining GPU queue, by reverse scan over finish peaks
    (Equation 4).

    Admissions below keep it up to date, and after the commit `State.envelope` says the same.
    """
    draft.migration = draft.reserve(draft.queue, draft.peak)


# A.1.4


def calls_home(draft: Draft) -> bool:
    """Beyond the appendix: whether this round's swap-ins and marks are judged as prompts are."""
    host, view = draft.departures.host_admission, draft.view
    return (
        host is not None and bool(view.cpu_running or view.cpu_waiting) and host.calls_home(draft)
    )


def admit_decodes(draft: Draft) -> None:
    """A.1.4, first half: all remaining GPU-resident decodes enter the batch; standing marks keep
    their reserve.
    """
    draft.round.decode = list(draft.runnable)
    draft.rows = draft.tokens = len(draft.runnable)
    for request in draft.view.marked:
        if (
            not draft.round.swap_out
            and draft.has_room_for_optional_row()
            and draft.takes_home(request)
        ):
            draft.reserve_mark(request)
        else:
            draft.round.withdraw.append(request)


def relieve_saturated_cpu_tier(draft: Draft) -> None:
    """A.1.4, second half: when the CPU batch is full and has a backlog, swap in before prompts
    take the HBM.
    """
    view = draft.view
    if (
        len(view.cpu_running) >= view.limits.cpu_rows
        and view.cpu_waiting
        and not draft.round.swap_out
    ):
        swap_in_ready_prefix(draft)


def swap_in_ready_prefix(draft: Draft) -> None:
    """Admits the ready FIFO prefix of CPU waiting that HBM can keep through completion."""
    withdrawn = draft.round.withdraw
    for request in draft.view.cpu_waiting:
        if request in draft.round.swap_in:
            continue
        reserved = request.marked and request not in withdrawn
        if reserved:
            draft.release_mark(request)
        fits = request.ready and draft.has_room_for_optional_row() and draft.takes_home(request)
        if not fits:
            if reserved:
                withdrawn.append(request)
            return
        draft.round.swap_in.append(request)
        draft.rows += 1
        draft.tokens += 1
        draft.free -= blocks_for(request.kv_len + 1)
        draft.queue = in_arrival_order(draft.queue, request)
        draft.peak += request.peak_blocks
        draft.migration = draft.reserve(draft.queue, draft.peak)  # 0 unless it is called home


# A.1.6


def use_residual_hbm(draft: Draft) -> None:
    """A.1.6: what HBM is left after the prefills takes in CPU-waiting requests, or marks running
    ones.

    Marks only when CPU waiting was empty to begin with: reclaiming a running request must not
    pass a backlog.
    """
    if draft.round.swap_out:
        return
    swap_in_ready_prefix(draft)
    for request in draft.view.cpu_waiting:  # yielded, and not taken in: the CPU may have it back
        if (
            request.marked
            and request not in draft.round.swap_in
            and request not in draft.round.withdraw
        ):
            draft.release_mark(request)
            draft.round.withdraw.append(request)
    if not draft.view.cpu_waiting:
        for request in draft.view.cpu_running:
            if not draft.has_room_for_optional_row():
                return
            ends_now = request.num_output + request.in_flight >= request.max_tokens
            if request.marked or ends_now:
                continue
            if draft.takes_home(request):
                draft.reserve_mark(request)
                draft.round.mark.append(request)
