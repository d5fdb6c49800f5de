"""One GPU scheduling round: Appendix A.1, paragraph by paragraph, as pure functions of a view.

Read it beside the paper. `gpu_round` lists the paragraphs; each function is one of them, and
works on a `Draft`, the decision so far with what it has left to spend. Nothing here touches a
queue, a pool or a device: `State` commits the result.
"""

from collections.abc import Iterator

from dualpace.runtime.schedule.draft import PAPER, Departures, Draft, in_arrival_order
from dualpace.runtime.schedule.rounds import GpuRound, Prefill
from dualpace.runtime.schedule.view import View, finish_peak
from dualpace.runtime.types import BLOCK_TOKENS, Request, blocks_for


def gpu_round(view: View, departures: Departures = PAPER) -> GpuRound:
    """Decides one round of the GPU engine under the dualpace policy."""
    draft = Draft(view, departures)
    if not transfer_safe_frontier(view):  # A.1.1
        return draft.round
    restore_next_token_feasibility(draft)  # A.1.2
    reserve_future_evictions(draft)  # A.1.3
    if not draft.waits:
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


# A.1.2


def restore_next_token_feasibility(draft: Draft) -> None:
    """A.1.2: make HBM hold every resident request's next token, by evicting from the tail.

    Enough victims: the others decode in this round and may take the victims' blocks. Some, not
    enough: a round of migrations only. None: the subset, in queue order, whose growth fits the
    free blocks; if that is empty, the youngest are dropped and recomputed until one can go on.
    """
    view = draft.view
    growth = next_growth(draft.queue)
    short = growth - draft.free
    draft.peak = view.gpu_peak
    draft.migration = draft.reserve(draft.queue, draft.peak)
    if short > 0 and (view.gpu_vacating or view.rounds_in_flight):
        draft.waits = (
            True  # re-evaluate the pressure once those copies, or the round in flight, are done
        )
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


def next_growth(queue: list[Request]) -> int:
    """Blocks for the next token of every request."""
    return sum([r.kv_len // BLOCK_TOKENS >= len(r.blocks) for r in queue])


def select_victims(draft: Draft, short: int) -> int:
    """Chooses swap-outs from the tail, skipping requests that the host cannot take; returns what
    is still short.

    Beyond the appendix: whom the host should not take is dropped, to be recomputed.
    """
    host = draft.departures.host
    for request in reversed(list(draft.queue)):
        if short <= 0:
            break
        if not request.ready:
            continue
        if host is not None and not host.takes_victim(draft, request):
            short -= len(request.blocks) + request.next_growth
            drop(draft, request)
            continue
        if request.peak_blocks > draft.view.envelope.capacity:
            continue
        blocks = blocks_for(request.kv_len)
        rest = [r for r in draft.queue if r is not request]
        peak = draft.peak - request.peak_blocks
        migration = draft.reserve(rest, peak)
        planned = draft.planned + blocks
        slack = draft.slack - blocks + draft.migration - migration
        if slack < 0 or planned - draft.view.envelope.planned > draft.view.host_free:
            continue
        short -= len(request.blocks) + request.next_growth
        draft.round.swap_out.append(request)
        draft.queue, draft.peak, draft.migration, draft.planned = rest, peak, migration, planned
    return short


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
    draft.migration = draft.reserve(draft.queue, draft.peak)


# A.1.3


def reserve_future_evictions(draft: Draft) -> None:
    """A.1.3: the host reserve for the remaining GPU queue, by reverse scan over finish peaks
    (Equation 4).

    `State` publishes the same number after the commit; admissions below keep it up to date.
    """
    draft.migration = draft.reserve(draft.queue, draft.peak)


# A.1.4


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
            and draft.promises_hbm(request)
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
        fits = request.ready and draft.has_room_for_optional_row() and draft.promises_hbm(request)
        if not fits:
            if reserved:
                withdrawn.append(request)
            return
        draft.round.swap_in.append(request)
        draft.rows += 1
        draft.tokens += 1
        draft.free -= blocks_for(request.kv_len + 1)
        draft.queue = in_arrival_order(draft.queue, request)
        draft.peak += request.peak_blocks  # all peaks fit together, so the reserve stays 0


# A.1.5


def admit_prefills(draft: Draft) -> None:
    """A.1.5: prompts in FIFO order, each to HBM if its KV fits there now, else to the host.

    Stops at the first prompt that some limit refuses; from the first host-bound one on, all of
    this round go to the host, so that no smaller one passes it.
    """
    if draft.round.preempt:
        return  # who lost its KV goes back among the prompts, perhaps before all of these
    for request in prompts(draft):
        if request.blocks:
            admitted = continue_prompt(draft, request)
        elif not draft.round.prefill_cpu and fits_hbm(draft, request):
            admitted = prefill_to_gpu(draft, request)
        else:
            admitted = prefill_to_cpu(draft, request)
        if not admitted:
            return


def prompts(draft: Draft) -> Iterator[Request]:
    """Waiting prompts while optional rows are left; the one that crosses the soft limit is the
    last.
    """
    for request in draft.view.waiting:
        if not draft.has_room_for_optional_row():
            return
        yield request


def fits_hbm(draft: Draft, request: Request) -> bool:
    """The prompt's persistent KV fits after all decodes' next tokens, swap-ins and marks."""
    return blocks_for(request.prefill_len) <= draft.free - draft.marked_blocks


def tokens_left(draft: Draft) -> int:
    """Tokens under the hard limit."""
    return draft.view.limits.hard_tokens - draft.tokens - draft.marked_rows


def chunk_left(draft: Draft) -> int:
    """Tokens that a prompt for HBM may take: to the hard limit, or where prompts are cut to the
    soft one.
    """
    if draft.departures.chunk_prompts:
        return draft.view.limits.soft_tokens - draft.tokens - draft.marked_rows
    return tokens_left(draft)


def continue_prompt(draft: Draft, request: Request) -> bool:
    """The next chunk of a prompt that is computed over several rounds. True if it was the last, so
    that others may follow.
    """
    rest = request.prefill_len - request.kv_len
    chunk = min(rest, chunk_left(draft))
    if chunk == rest:  # with its last chunk it joins the queue and may be evicted
        queue = in_arrival_order(draft.queue, request)
        migration = draft.reserve(queue, draft.peak)
        if draft.slack + draft.migration - migration < 0:
            return False
        draft.queue, draft.migration = queue, migration
    if chunk > 0:
        add_prompt(
            draft, Prefill(request, chunk, request.estimated_output), draft.round.prefill_gpu
        )
    return chunk == rest


def prefill_to_gpu(draft: Draft, request: Request) -> bool:
    """Admits a prompt to HBM if the reserve for its later eviction keeps Equation 2."""
    length, estimate = request.prefill_len, draft.view.estimated_output(request)
    left = chunk_left(draft)
    whole = left if draft.departures.chunk_prompts else draft.view.limits.hard_tokens
    chunked = length > whole
    if left <= 0 or (length > left and not chunked):
        return False
    own = finish_peak(request, estimate)
    peak = draft.peak + own
    queue = (
        draft.queue if chunked else in_arrival_order(draft.queue, request)
    )  # no chunked prompt is evicted
    migration = migration_with(draft, queue, peak, request, own)
    if draft.slack + draft.migration - migration < draft.cpu_promise:
        return False
    draft.queue, draft.peak, draft.migration = queue, peak, migration
    draft.free -= blocks_for(length)
    add_prompt(draft, Prefill(request, min(length, left), estimate), draft.round.prefill_gpu)
    return not chunked


def prefill_to_cpu(draft: Draft, request: Request) -> bool:
    """Admits a prompt to the host through staging if the decode-admission limit and Equation 2
    allow it.
    """
    view, limits, host = draft.view, draft.view.limits, draft.departures.host
    length, estimate = request.prefill_len, draft.view.estimated_output(request)
    blocks = blocks_for(length)
    promise = draft.cpu_promise
    peak = finish_peak(request, estimate)
    first_on_host = not (view.cpu_running or view.cpu_waiting or draft.round.prefill_cpu)
    if first_on_host:
        promise = peak - blocks
    if (
        length > min(tokens_left(draft), limits.staging - draft.staged)
        or len(view.cpu_waiting) + len(draft.round.prefill_cpu) >= limits.host_admission
        or draft.planned - view.envelope.planned + blocks > view.host_free
        or peak > view.envelope.capacity
        or draft.slack - blocks < promise
        or (host is not None and not host.takes_prompt(draft, request, estimate))
    ):
        return False
    draft.cpu_promise = promise
    draft.planned += blocks
    draft.staged += length
    add_prompt(draft, Prefill(request, length, estimate), draft.round.prefill_cpu)
    return True


def add_prompt(draft: Draft, prefill: Prefill, prompts: list[Prefill]) -> None:
    prompts.append(prefill)
    draft.rows += 1
    draft.tokens += prefill.num_tokens


def migration_with(
    draft: Draft, queue: list[Request], peak: int, candidate: Request, own: int
) -> int:
    """Equation 4 for a queue in which the candidate's finish peak is `own`, not committed yet."""
    reserve = 0
    if peak > draft.view.gpu_capacity:
        judged = {p.request.id: p for p in draft.round.prefill_gpu}
        for request in reversed(queue):
            if request is candidate:
                reserve += own
            elif request.id in judged:
                reserve += finish_peak(request, judged[request.id].estimated_output)
            else:
                reserve += request.peak_blocks
            if peak - reserve <= draft.view.gpu_capacity:
                break
    return reserve


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
            if draft.promises_hbm(request):
                draft.reserve_mark(request)
                draft.round.mark.append(request)
