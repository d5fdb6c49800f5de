"""What the death of a worker does to the state: steps and copies in flight are void, no request
is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualpace.runtime.schedule.rounds import Row
from dualpace.runtime.types import Phase, Request

if TYPE_CHECKING:
    from dualpace.runtime.schedule.state import State


def lose_gpu(state: State) -> list[Request]:
    """State.lose_gpu: HBM is gone, and with it every copy that was reading or writing it."""
    lost = {r.id: r for r in (*state.gpu_running, *state.ending.values())}
    if state.waiting and state.waiting[0].blocks:
        lost[state.waiting[0].id] = state.waiting[0]
    for step in state.gpu_in_flight:
        state.end_lockstep(step)
        for row in step.rows:
            row.request.in_flight -= row.sample
            row.request.pins -= not row.sample
            lost[row.request.id] = row.request
        for row in (*step.host_rows[0], *step.host_rows[1]):
            undo_host_row(state, row)
    state.gpu_in_flight.clear()
    for transfer in state.transfers.values():
        state.retire(transfer)
        lost[transfer.request.id] = transfer.request
    state.transfers.clear()
    for request in lost.values():
        state.release_if_unpinned(request)
    alive = [r for r in lost.values() if r.phase is not Phase.ENDED]
    alive.sort(key=lambda r: r.order)
    for request in alive:
        state.leave_queues(request)
        state.recompute(request, state.preempted_gpu)
    return alive


def lose_cpu(state: State) -> None:
    """State.lose_cpu: K/V writes are idempotent, so the same tokens may be computed again in
    place.
    """
    step, state.cpu_in_flight = state.cpu_in_flight, None
    for row in step.rows if step else ():
        undo_host_row(state, row)


def undo_host_row(state: State, row: Row) -> None:
    request = row.request
    request.in_flight -= 1
    request.kv_len -= 1
    state.release_if_unpinned(request)
