"""What must hold in a ledger between any two verbs of `State`. Reads all of it, changes nothing."""

from dualpace.block import blocks_for
from dualpace.runtime.schedule.envelope import finish_growth, gpu_peak
from dualpace.runtime.schedule.ledger import Ledger
from dualpace.runtime.types import Owner, Phase, Request


def check(ledger: Ledger) -> None:
    """Raises AssertionError at the first broken invariant."""
    check_pools(ledger)
    check_ownership(ledger)
    check_counts(ledger)
    check_requests(ledger)


def check_pools(ledger: Ledger) -> None:
    """free + used = total, and every used block has one holder: a request, or a copy's source."""
    held: tuple[list[int], list[int]] = ([], [])
    for request in (*ledger.requests.values(), *ledger.lingering.values()):
        held[request.owner].extend(request.blocks)
    for transfer in ledger.transfers.values():
        source = Owner.CPU if transfer.request.owner is Owner.GPU else Owner.GPU
        held[source].extend(transfer.held)
    ledger.gpu_pool.check(held[Owner.GPU])
    ledger.host_pool.check(held[Owner.CPU])


def check_ownership(ledger: Ledger) -> None:
    """Every live request is in exactly one queue, its owner's."""
    gpu: list[Request] = [*ledger.waiting, *ledger.gpu_running]
    cpu: list[Request] = [*ledger.cpu_waiting, *ledger.cpu_running]
    everyone = [*gpu, *cpu, *ledger.ending.values()]
    assert len(everyone) == len({r.id for r in everyone}) == len(ledger.requests), (
        "a request has two places or none"
    )
    assert all(ledger.requests.get(r.id) is r for r in everyone), "a queue holds a stranger"
    assert all(r.owner is Owner.GPU for r in gpu) and all(r.owner is Owner.CPU for r in cpu)
    assert all(r.phase is Phase.WAITING for r in ledger.waiting)
    assert all(r.phase is Phase.DECODING for r in (*ledger.gpu_running, *cpu))
    assert all(r.phase is Phase.ENDED for r in ledger.lingering.values())
    fresh = [r.order for r in ledger.waiting if not r.blocks]
    assert fresh == sorted(fresh), "waiting is not in arrival order"
    assert not any(r.blocks for r in list(ledger.waiting)[1:]), (
        "only the head of waiting is in progress"
    )
    orders = [r.order for r in ledger.gpu_running]
    assert orders == sorted(orders), "GPU decodes are not in arrival order"
    assert all(r.marked for r in ledger.marked) and len(set(map(id, ledger.marked))) == len(
        ledger.marked
    )
    assert {r.id for r in everyone if r.marked} == {r.id for r in ledger.marked}
    assert all(r.owner is Owner.CPU for r in ledger.marked), "only CPU-owned requests are marked"
    assert ledger.on_probation == {r.id: r for r in ledger.requests.values() if r.probation}


def check_counts(ledger: Ledger) -> None:
    """Counts kept on the side agree with what they count; pins agree with rows and copies in
    flight.
    """
    assert ledger.queue_peak == gpu_peak(ledger.gpu_running)
    assert ledger.growth == finish_growth(ledger.cpu_running)
    writes = [t for t in ledger.transfers.values() if t.request.owner is Owner.CPU]
    assert ledger.planned == sum(len(t.dst_blocks) for t in writes)
    assert ledger.gpu_vacating == sum(len(t.held) for t in writes)
    rows = [row for step in ledger.gpu_in_flight for row in step.all_rows]
    rows += ledger.cpu_in_flight.rows if ledger.cpu_in_flight else []
    touching = [row.request for row in rows if not row.sample]
    touching += [t.request for t in ledger.transfers.values()]
    for request in (*ledger.requests.values(), *ledger.lingering.values()):
        assert request.pins == sum(r is request for r in touching), (
            f"request {request.id} is pinned wrongly"
        )
        sampling = sum(row.request is request and row.sample for row in rows)
        assert request.in_flight == sampling, f"request {request.id} has other tokens in flight"


def check_requests(ledger: Ledger) -> None:
    """Every request's numbers fit together."""
    for request in ledger.requests.values():
        assert len(request.blocks) >= blocks_for(request.kv_len) or not request.blocks
        assert 0 <= request.num_output + request.in_flight <= request.max_tokens
        if request.phase is Phase.DECODING:
            stored = request.prompt_len + request.num_output + request.in_flight - 1
            assert request.kv_len == stored, (
                f"request {request.id} stores {request.kv_len}, not {stored}"
            )
            assert request.peak_blocks >= len(request.blocks), "a finish peak is below what is held"
