"""Whom a round was lost with, where the worker itself is at fault: a request whose row no kernel
survives would end every round that it is in, and with it everybody's.

All requests of the lost round are suspects, and each runs alone before it joins others again. One
with which the worker is lost even then is the culprit; a token gained alone clears the others. A
row may be survived by a prefill and not by a decode, so with each further loss a suspect has to
gain twice as many tokens alone.

Beyond the paper. Any policy decides here about one request, and elsewhere about all; where nobody
can run alone (a full pool), rounds are as ever.
"""

from collections.abc import Iterable
from dataclasses import replace

from dualpace.runtime.schedule.cpu_round import Draft
from dualpace.runtime.schedule.ledger import Ledger
from dualpace.runtime.schedule.policies import Policy
from dualpace.runtime.schedule.rounds import CpuRound, GpuRound, Row
from dualpace.runtime.schedule.view import View
from dualpace.runtime.types import Owner, Phase, Request


def accuse(ledger: Ledger, worker: Owner, was_assisting: bool) -> Request | None:
    """The culprit, if the lost worker's rounds in flight prove one; else all of them are suspects.

    Call it before `lose_gpu` or `lose_cpu`, which void these rounds.
    """
    inside = {row.request.id: row.request for row in _rows_of(ledger, worker)}
    if len(inside) == 1 and not was_assisting:
        (only,) = inside.values()
        if only.id in ledger.on_probation:
            return only
    for request in inside.values():
        if request.phase is not Phase.ENDED:
            request.losses += 1
            request.probation = 1 << (request.losses - 1)
            ledger.on_probation[request.id] = request
    return None


def _rows_of(ledger: Ledger, worker: Owner) -> list[Row]:
    """Both workers are given a round in lockstep (neo), all of it."""
    if worker is Owner.GPU:
        return [row for step in ledger.gpu_in_flight for row in step.all_rows]
    rows = list(ledger.cpu_in_flight.rows) if ledger.cpu_in_flight else []
    shared = [step for step in ledger.gpu_in_flight if step.has_host_rows]
    return rows + [row for step in shared for row in step.all_rows]


def tried_by_gpu(policy: Policy, suspects: Iterable[Request]) -> list[Request]:
    """Those that have to run alone in a GPU round, in the order in which they are tried.

    Those on the host come youngest first, as each leaves the queue's head behind it to the next:
    in the end it is in arrival order again.
    """
    by_order = sorted(suspects, key=lambda r: r.order)
    own = [r for r in by_order if r.owner is Owner.GPU]
    return own if policy.has_cpu_engine else own + tried_by_cpu(by_order)


def tried_by_cpu(suspects: Iterable[Request]) -> list[Request]:
    """Of the host-resident, youngest first."""
    return sorted((r for r in suspects if r.owner is Owner.CPU), key=lambda r: -r.order)


def gpu_round_alone(view: View, policy: Policy, suspects: Iterable[Request]) -> GpuRound | None:
    """A round of one row, of the first of the suspects that can run. Nothing may be in flight."""
    partial = view.waiting[0] if view.waiting and view.waiting[0].blocks else None
    for request in suspects:
        if request.owner is Owner.CPU:
            if _may_decode(view, request):
                return GpuRound(host=([request], []))
        elif request.phase is Phase.DECODING:
            if request.next_growth <= view.gpu_free:
                return GpuRound(decode=[request])
        elif partial is None or partial is request:
            decided = policy.gpu_round(replace(view, waiting=(request,)))
            if decided.prefill_gpu or decided.prefill_cpu:
                return GpuRound(prefill_gpu=decided.prefill_gpu, prefill_cpu=decided.prefill_cpu)
    return None


def cpu_round_alone(view: View, suspects: Iterable[Request]) -> CpuRound | None:
    """An iteration of one row; all others that run go to the front of waiting."""
    for request in suspects:
        if _may_decode(view, request):
            others = [r for r in view.cpu_running if r is not request]
            is_new = len(others) == len(view.cpu_running)
            return CpuRound(decode=[request], displaced=others, admitted=int(is_new))
    return None


def _may_decode(view: View, request: Request) -> bool:
    """A marked request is the GPU's to take."""
    return request.ready and not request.marked and Draft(view).take(request)
