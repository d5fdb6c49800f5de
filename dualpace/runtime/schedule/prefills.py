"""Which prompts a GPU round takes in, and to which tier: Appendix A.1.5.

Works on the draft of a GPU round and knows nothing of evictions or swap-ins.
"""

from collections.abc import Iterator

from dualpace.block import blocks_for
from dualpace.runtime.schedule.draft import Draft, in_arrival_order
from dualpace.runtime.schedule.rounds import Prefill
from dualpace.runtime.schedule.view import finish_peak
from dualpace.runtime.types import Request


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
    soft one. At least one, as an optional row has room.
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
        if draft.slack(migration) < 0:
            return False
        draft.queue, draft.migration = queue, migration
    add_prompt(draft, Prefill(request, chunk, request.estimated_output), draft.round.prefill_gpu)
    return chunk == rest


def prefill_to_gpu(draft: Draft, request: Request) -> bool:
    """Admits a prompt to HBM if the reserve for its later eviction keeps Equation 2."""
    length, estimate = request.prefill_len, draft.view.estimated_output(request)
    left = chunk_left(draft)
    whole = left if draft.departures.chunk_prompts else draft.view.limits.hard_tokens
    chunked = length > whole
    if length > left and not chunked:
        return False
    own = finish_peak(request, estimate)
    peak = draft.peak + own
    # No chunked prompt is evicted.
    queue = draft.queue if chunked else in_arrival_order(draft.queue, request)
    migration = migration_with(draft, queue, peak, request, own)
    if draft.slack(migration) < draft.cpu_promise:
        return False
    draft.queue, draft.peak, draft.migration = queue, peak, migration
    draft.free -= blocks_for(length)
    add_prompt(draft, Prefill(request, min(length, left), estimate), draft.round.prefill_gpu)
    return not chunked


def prefill_to_cpu(draft: Draft, request: Request) -> bool:
    """Admits a prompt to the host through staging if the decode-admission limit and Equation 2
    allow it.
    """
    view, limits, host = draft.view, draft.view.limits, draft.departures.host_admission
    length, estimate = request.prefill_len, draft.view.estimated_output(request)
    blocks, peak = blocks_for(length), finish_peak(request, estimate)
    is_first_on_host = not (view.cpu_running or view.cpu_waiting or draft.round.prefill_cpu)
    promise = peak - blocks if is_first_on_host else draft.cpu_promise
    if (
        length > min(tokens_left(draft), limits.staging - draft.staged)
        or len(view.cpu_waiting) + len(draft.round.prefill_cpu) >= limits.host_admission
        or blocks > draft.host_free
        or peak > view.envelope.capacity
        or draft.slack(draft.migration) - blocks < promise
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
