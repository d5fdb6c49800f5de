"""What the tokens of a step that has run do to its requests. Counts tokens, ends requests and
decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from dualpace.runtime.schedule.rounds import Applied, CpuStep, GpuStep, Row
from dualpace.runtime.schedule.view import finish_peak
from dualpace.runtime.types import Owner, Phase, Request

if TYPE_CHECKING:
    from dualpace.runtime.schedule.state import State


def apply_rows(
    state: State, step: GpuStep | CpuStep, rows: Iterable[Row], finished: Collection[int]
) -> Applied:
    """Each row that sampled gains one token. Rows of requests that have ended are dropped; those at
    max_tokens or in `finished` end now.
    """
    applied = Applied(step, [], [], [], [])
    batch, sampled, ended = applied.batch, applied.sampled, Phase.ENDED
    for row in rows:
        request = row.request
        if row.sample:
            request.in_flight -= 1
        else:
            request.pins -= 1
        if request.phase is ended:
            applied.dropped.append(request)
            state.release_if_unpinned(request)
            continue
        batch.append(request.id)
        if not row.sample:
            continue
        request.num_output += 1
        sampled.append(request)
        if request.num_output >= request.max_tokens or request.id in finished:
            applied.finished.append(request)
            state.estimator.observe(request.num_output)
            state.end(request)
    for request in step.due:
        outgrow_if_due(state, request)
    return applied


def outgrow_if_due(state: State, request: Request) -> None:
    """An answer longer than was thought gets a new estimate, so a higher finish peak."""
    outputs = request.num_output + request.in_flight
    expected = request.estimated_output
    if request.phase is not Phase.DECODING or not expected <= outputs < request.max_tokens:
        return
    before = request.peak_blocks
    request.estimated_output = state.estimator.outgrown(outputs, request.max_tokens)
    request.peak_blocks = finish_peak(request, request.estimated_output)
    if request.owner is Owner.GPU:
        state.queue_peak += request.peak_blocks - before
    else:
        state.recount_growth()
