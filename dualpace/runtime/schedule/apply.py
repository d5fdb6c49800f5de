"""What the tokens of a step that has run do to its requests. Counts tokens, ends requests and
decides nothing.
"""

from collections.abc import Collection, Iterable

from dualpace.runtime.schedule.estimate import Estimator
from dualpace.runtime.schedule.ledger import Ledger
from dualpace.runtime.schedule.rounds import Applied, CpuStep, GpuStep
from dualpace.runtime.schedule.view import finish_peak
from dualpace.runtime.types import Owner, Phase, Request


def apply_rows(
    ledger: Ledger, step: GpuStep | CpuStep, finished: Collection[int], estimator: Estimator
) -> Applied:
    """Each row that sampled gains one token. Rows of requests that have ended are dropped; those at
    max_tokens or in `finished` end now.
    """
    applied = Applied(step, [], [], [], [])
    batch, sampled, ended = applied.batch, applied.sampled, Phase.ENDED
    for row in step.all_rows:
        request = row.request
        if row.sample:
            request.in_flight -= 1
        else:
            request.pins -= 1
        if request.phase is ended:
            applied.dropped.append(request)
            ledger.release_if_unpinned(request)
            continue
        batch.append(request.id)
        if not row.sample:
            continue
        request.num_output += 1
        sampled.append(request)
        if request.num_output >= request.max_tokens or request.id in finished:
            applied.finished.append(request)
            estimator.observe(request.num_output)
            ledger.end(request)
    for request in step.due:
        outgrow_if_due(ledger, request, estimator)
    if ledger.on_probation:
        clear(ledger, sampled)
    return applied


def clear(ledger: Ledger, sampled: Iterable[Request]) -> None:
    """Each suspect among them has gained a token."""
    for request in sampled:
        if request.id in ledger.on_probation:
            request.probation -= 1
            if not request.probation:
                del ledger.on_probation[request.id]


def outgrow_if_due(ledger: Ledger, request: Request, estimator: Estimator) -> None:
    """An answer longer than was thought gets a new estimate, so a higher finish peak."""
    outputs = request.num_output + request.in_flight
    expected = request.estimated_output
    if request.phase is not Phase.DECODING or not expected <= outputs < request.max_tokens:
        return
    before = request.peak_blocks
    request.estimated_output = estimator.outgrown(outputs, request.max_tokens)
    request.peak_blocks = finish_peak(request, request.estimated_output)
    if request.owner is Owner.GPU:
        ledger.queue_peak += request.peak_blocks - before
    else:
        ledger.recount_growth()
