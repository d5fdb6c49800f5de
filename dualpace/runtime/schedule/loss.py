"""What the death of a worker does to the ledger: steps and copies in flight are void, no request
is lost.
"""

from collections.abc import Iterable
from dataclasses import replace

from dualpace.runtime.schedule.ledger import Ledger
from dualpace.runtime.schedule.rounds import Applied, GpuStep, Row
from dualpace.runtime.types import Phase, Request


def lose_gpu(ledger: Ledger) -> list[Request]:
    """State.lose_gpu: HBM is gone, and with it every copy that was reading or writing it."""
    lost = {r.id: r for r in (*ledger.gpu_running, *ledger.ending.values())}
    if ledger.in_progress:
        lost[ledger.in_progress.id] = ledger.in_progress
    for step in ledger.gpu_in_flight:
        ledger.end_lockstep(step)
        for row in step.rows:
            row.request.in_flight -= row.sample
            row.request.pins -= not row.sample
            lost[row.request.id] = row.request
        for row in (*step.host_rows[0], *step.host_rows[1]):
            undo_host_row(ledger, row)
    ledger.gpu_in_flight.clear()
    for transfer in ledger.transfers.values():
        ledger.retire(transfer)
        lost[transfer.request.id] = transfer.request
    ledger.transfers.clear()
    for request in lost.values():
        ledger.release_if_unpinned(request)
    alive = [r for r in lost.values() if r.phase is not Phase.ENDED]
    alive.sort(key=lambda r: r.order)
    for request in alive:
        ledger.leave_queues(request)
        ledger.recompute(request, ledger.preempted_gpu)
    return alive


def remains(step: GpuStep, lost: Iterable[Request]) -> Applied | None:
    """What a lost round has done all the same, for its record: preemptions, and swap-outs whose
    copies had ended. None: nothing. `lost` are who lost their KV with it.
    """
    gone = {request.id for request in lost}
    moved = [i for i in step.swap_out if i not in gone]
    if not (moved or step.preempted):
        return None
    nothing: list[int] = []
    rest = replace(
        step, prefill_gpu=nothing, prefill_cpu=nothing, swap_in=nothing, marked=nothing,
        swap_out=moved,
    )  # fmt: skip
    return Applied(rest, sampled=[], finished=[], dropped=[], batch=[])


def lose_cpu(ledger: Ledger) -> None:
    """State.lose_cpu: K/V writes are idempotent, so the same tokens may be computed again in
    place.
    """
    step, ledger.cpu_in_flight = ledger.cpu_in_flight, None
    for row in step.rows if step else ():
        undo_host_row(ledger, row)


def undo_host_row(ledger: Ledger, row: Row) -> None:
    request = row.request
    request.in_flight -= 1
    request.kv_len -= 1
    ledger.release_if_unpinned(request)
