"""What must hold between any two verbs of `State`. Reads everything, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualpace.runtime.schedule.envelope import finish_growth, gpu_peak
from dualpace.runtime.types import Owner, Phase, Request, blocks_for

if TYPE_CHECKING:
    from dualpace.runtime.schedule.state import State


def check(state: State) -> None:
    """Raises AssertionError at the first broken invariant."""
    check_pools(state)
    check_ownership(state)
    check_counts(state)
    check_requests(state)
    if state.policy.guards_host and state.estimator.exact:
        assert state.envelope.holds, f"Equation 2 is broken: {state.envelope}"


def check_pools(state: State) -> None:
    """free + used = total, and every used block has one holder: a request, or a copy's source."""
    held: tuple[list[int], list[int]] = ([], [])
    for request in (*state.requests.values(), *state.lingering.values()):
        held[request.owner].extend(request.blocks)
    for transfer in state.transfers.values():
        source = Owner.CPU if transfer.request.owner is Owner.GPU else Owner.GPU
        held[source].extend(transfer.held)
    state.gpu_pool.check(held[Owner.GPU])
    state.host_pool.check(held[Owner.CPU])


def check_ownership(state: State) -> None:
    """Every live request is in exactly one queue, its owner's."""
    gpu: list[Request] = [*state.waiting, *state.gpu_running]
    cpu: list[Request] = [*state.cpu_waiting, *state.cpu_running]
    everyone = [*gpu, *cpu, *state.ending.values()]
    assert len(everyone) == len({r.id for r in everyone}) == len(state.requests), (
        "a request has two places or none"
    )
    assert all(state.requests.get(r.id) is r for r in everyone), "a queue holds a stranger"
    assert all(r.owner is Owner.GPU for r in gpu) and all(r.owner is Owner.CPU for r in cpu)
    assert all(r.phase is Phase.WAITING for r in state.waiting)
    assert all(r.phase is Phase.DECODING for r in (*state.gpu_running, *cpu))
    assert all(r.phase is Phase.ENDED for r in state.lingering.values())
    fresh = [r.order for r in state.waiting if not r.blocks]
    assert fresh == sorted(fresh), "waiting is not in arrival order"
    assert not any(r.blocks for r in list(state.waiting)[1:]), (
        "only the head of waiting is in progress"
    )
    orders = [r.order for r in state.gpu_running]
    assert orders == sorted(orders), "GPU decodes are not in arrival order"
    assert all(r.marked for r in state.marked) and len(set(map(id, state.marked))) == len(
        state.marked
    )
    assert {r.id for r in everyone if r.marked} == {r.id for r in state.marked}
    assert all(r.owner is Owner.CPU for r in state.marked), "only CPU-owned requests are marked"


def check_counts(state: State) -> None:
    """Counts kept on the side agree with what they count; pins agree with rows and copies in
    flight.
    """
    assert state.queue_peak == gpu_peak(state.gpu_running)
    assert state.growth == finish_growth(state.cpu_running)
    writes = [t for t in state.transfers.values() if t.request.owner is Owner.CPU]
    assert state.planned == sum(len(t.dst_blocks) for t in writes)
    assert state.gpu_vacating == sum(len(t.held) for t in writes)
    rows = [
        row
        for step in state.gpu_in_flight
        for row in (*step.rows, *step.host_rows[0], *step.host_rows[1])
    ]
    rows += state.cpu_in_flight.rows if state.cpu_in_flight else []
    touching = [row.request for row in rows if not row.sample]
    touching += [t.request for t in state.transfers.values()]
    for request in (*state.requests.values(), *state.lingering.values()):
        assert request.pins == sum(r is request for r in touching), (
            f"request {request.id} is pinned wrongly"
        )
        sampling = sum(row.request is request and row.sample for row in rows)
        assert request.in_flight == sampling, f"request {request.id} has other tokens in flight"


def check_requests(state: State) -> None:
    """Every request's numbers fit together."""
    for request in state.requests.values():
        assert len(request.blocks) >= blocks_for(request.kv_len) or not request.blocks
        assert 0 <= request.num_output + request.in_flight <= request.max_tokens
        if request.phase is Phase.DECODING:
            stored = request.prompt_len + request.num_output + request.in_flight - 1
            assert request.kv_len == stored, (
                f"request {request.id} stores {request.kv_len}, not {stored}"
            )
            assert request.peak_blocks >= len(request.blocks), "a finish peak is below what is held"
