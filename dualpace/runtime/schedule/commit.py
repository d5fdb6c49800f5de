"""A.1.7 and A.2.5: a decision becomes blocks, queue places and rows. The only code that allocates
KV.

Decides nothing: an allocation that does not fit is a bug of the decision and trips an assertion.
Every verb runs to its end without waiting, so that either engine's loop may change both pools.
"""

from dualpace.block import BLOCK_TOKENS, blocks_for
from dualpace.runtime.schedule.ledger import Ledger
from dualpace.runtime.schedule.rounds import (
    CpuRound,
    CpuStep,
    GpuRound,
    GpuStep,
    Prefill,
    Row,
    Transfer,
)
from dualpace.runtime.schedule.view import finish_peak
from dualpace.runtime.types import Owner, Phase, Request, RowKind, TransferKind

DECODE = RowKind.DECODE  # a global is found faster than an enum's member, 256 times a round


def commit_gpu(ledger: Ledger, decision: GpuRound) -> GpuStep | None:
    """Commits a GPU decision; None if it holds neither rows nor transfers."""
    for request in decision.withdraw:
        ledger.unmark(request)
    for request in decision.preempt:
        ledger.recompute(request, ledger.preempted_gpu)
    evictions = [swap_out(ledger, request) for request in decision.swap_out]
    due: list[Request] = []
    rows = decode_rows(ledger, decision.decode, evictions, due)
    arrivals = [swap_in(ledger, request) for request in decision.swap_in]
    rows += decode_rows(ledger, decision.swap_in, [], due)
    rows += [prefill_to_gpu(ledger, prefill, due) for prefill in decision.prefill_gpu]
    rows += [prefill_to_cpu(ledger, prefill, due) for prefill in decision.prefill_cpu]
    lockstep = host_sub_batches(ledger, decision.host, due) if any(decision.host) else ([], [])
    for request in decision.mark:
        ledger.mark(request)
    transfers = evictions + arrivals
    if not (rows or transfers or any(lockstep)):
        return None
    ledger.gpu_rounds += 1
    step = GpuStep(
        number=ledger.gpu_rounds,
        rows=rows,
        transfers=transfers,
        snapshot=ledger.snapshot(),
        prefill_gpu=[p.request.id for p in decision.prefill_gpu],
        prefill_cpu=[p.request.id for p in decision.prefill_cpu],
        swap_out=[r.id for r in decision.swap_out],
        swap_in=[r.id for r in decision.swap_in],
        marked=[r.id for r in decision.mark],
        preempted=ledger.preempted_gpu,
        host_rows=lockstep,
        exclusive=decision.exclusive or bool(ledger.preempted_gpu),
        due=due,
    )
    ledger.preempted_gpu = []
    return step


def commit_cpu(ledger: Ledger, decision: CpuRound) -> CpuStep | None:
    """Commits a CPU decision; None if its batch is empty."""
    if not (decision.decode or decision.displaced or decision.preempt):
        return None  # nothing decided: rows in lockstep with the GPU (neo) stay where they are
    for request in decision.preempt:
        ledger.cpu_waiting.remove(request)
        ledger.recompute(request, ledger.preempted_cpu)
    for request in decision.decode[len(decision.decode) - decision.admitted :]:
        ledger.cpu_waiting.remove(request)
    ledger.cpu_waiting.extendleft(reversed(decision.displaced))
    ledger.set_cpu_running(list(decision.decode))
    if not decision.decode:
        return None
    due: list[Request] = []
    rows = host_rows(ledger, decision.decode, DECODE, due)
    ledger.cpu_rounds += 1
    step = CpuStep(
        ledger.cpu_rounds, rows, ledger.snapshot(), ledger.preempted_cpu, decision.may_assist, due
    )
    ledger.preempted_cpu = []
    return step


def swap_out(ledger: Ledger, request: Request) -> Transfer:
    """Takes the host destination before the GPU lets go; the CPU sees the request after the
    report.
    """
    source = request.blocks
    count = blocks_for(request.kv_len)
    request.blocks = ledger.host_pool.allocate(count)
    ledger.planned += count
    ledger.leave_gpu_queue(request)
    request.owner = Owner.CPU
    ledger.cpu_waiting.append(request)
    ledger.gpu_vacating += len(source)
    return ledger.start_transfer(
        request, TransferKind.SWAP_OUT, source[:count], request.blocks, held=source
    )


def swap_in(ledger: Ledger, request: Request) -> Transfer:
    """Takes the HBM destination before the host lets go; host blocks are free after the report."""
    source = request.blocks
    ledger.cpu_waiting.remove(request)
    ledger.unmark(request)
    count = blocks_for(request.kv_len)
    request.blocks = ledger.gpu_pool.allocate(blocks_for(request.kv_len + 1))
    request.owner = Owner.GPU
    ledger.join_gpu_queue(request)
    return ledger.start_transfer(
        request, TransferKind.SWAP_IN, source[:count], request.blocks[:count], held=source
    )


def decode_rows(
    ledger: Ledger, requests: list[Request], evictions: list[Transfer], due: list[Request]
) -> list[Row]:
    """One row each, with the block for its next token from the free list, else from this round's
    victims. Like all that make rows, adds to `due` whoever's token reaches its estimate.
    """
    rows = []
    for request in requests:
        kv_len, blocks = request.kv_len, request.blocks
        if kv_len // BLOCK_TOKENS >= len(blocks):
            blocks.append(next_block(ledger, evictions))
        request.kv_len = kv_len + 1
        request.in_flight += 1
        rows.append(Row(request, DECODE, kv_len, 1, blocks))
        if request.num_output + request.in_flight >= request.estimated_output:
            if request.num_output + request.in_flight >= request.max_tokens:
                ledger.leave_gpu_queue(request)
                ledger.ending[request.id] = request
            else:
                due.append(request)
    return rows


def next_block(ledger: Ledger, evictions: list[Transfer]) -> int:
    if ledger.gpu_pool.num_free:
        return ledger.gpu_pool.allocate(1)[0]
    donor = next(t for t in evictions if t.held)
    ledger.gpu_vacating -= 1
    return donor.held.pop()


def admit(ledger: Ledger, prefill: Prefill) -> Request:
    """Fixes the estimate that the admission was judged by."""
    request = prefill.request
    request.estimated_output = prefill.estimated_output
    request.peak_blocks = finish_peak(request, prefill.estimated_output)
    return request


def prefill_to_gpu(ledger: Ledger, prefill: Prefill, due: list[Request]) -> Row:
    """A prompt or its next chunk; at the first, all blocks of the prompt; after the last, GPU
    decode.
    """
    request = prefill.request
    if not request.blocks:
        admit(ledger, prefill)
        ledger.waiting.remove(request)
        ledger.waiting.appendleft(request)  # until its last chunk it stays at the head
        request.blocks = ledger.gpu_pool.allocate(blocks_for(request.prefill_len))
    start = request.kv_len
    request.kv_len += prefill.num_tokens
    last = request.kv_len == request.prefill_len
    if last:
        ledger.waiting.remove(request)
        request.phase = Phase.DECODING
        request.in_flight += 1
        if request.num_output + 1 >= request.max_tokens:
            ledger.ending[request.id] = request
        else:
            ledger.join_gpu_queue(request)
            if request.num_output + 1 >= request.estimated_output:
                due.append(request)
    else:
        request.pins += 1
    return Row(request, RowKind.PREFILL_GPU, start, prefill.num_tokens, request.blocks, sample=last)


def prefill_to_cpu(ledger: Ledger, prefill: Prefill, due: list[Request]) -> Row:
    """A whole prompt through staging to its host blocks; unready in CPU waiting until the copies
    are done.
    """
    request = admit(ledger, prefill)
    ledger.waiting.remove(request)
    request.blocks = ledger.host_pool.allocate(blocks_for(prefill.num_tokens))
    ledger.planned += len(request.blocks)
    request.kv_len = prefill.num_tokens
    request.in_flight += 1
    request.phase, request.owner = Phase.DECODING, Owner.CPU
    if request.num_output + 1 >= request.max_tokens:
        ledger.ending[request.id] = request
    else:
        ledger.cpu_waiting.append(request)
        if request.num_output + 1 >= request.estimated_output:
            due.append(request)
    copies = ledger.start_transfer(request, TransferKind.PREFILL_CPU, [], request.blocks, held=[])
    ledger.staging.add(copies.id)
    return Row(
        request, RowKind.PREFILL_CPU, 0, prefill.num_tokens, request.blocks, transfer_id=copies.id
    )


def host_rows(
    ledger: Ledger, requests: list[Request], kind: RowKind, due: list[Request]
) -> list[Row]:
    """Decode rows on host KV, each with the one block that its next token needs and no more."""
    rows = []
    for request in requests:
        kv_len, blocks = request.kv_len, request.blocks
        if kv_len // BLOCK_TOKENS >= len(blocks):
            blocks += ledger.host_pool.allocate(1)
        request.kv_len = kv_len + 1
        request.in_flight += 1
        rows.append(Row(request, kind, kv_len, 1, blocks))
        if request.num_output + request.in_flight >= request.estimated_output:
            due.append(request)
    return rows


def host_sub_batches(
    ledger: Ledger, sub_batches: tuple[list[Request], list[Request]], due: list[Request]
) -> tuple[list[Row], list[Row]]:
    """Host rows in lockstep with the GPU (neo): they are the running queue until the next round."""
    chosen = {r.id for batch in sub_batches for r in batch}
    everyone = [*ledger.cpu_running, *ledger.cpu_waiting]
    ledger.set_cpu_running([r for r in everyone if r.id in chosen])
    ledger.cpu_waiting.clear()
    ledger.cpu_waiting.extend(r for r in everyone if r.id not in chosen)
    first, second = sub_batches
    return (
        host_rows(ledger, first, RowKind.HOST_FIRST, due),
        host_rows(ledger, second, RowKind.HOST_SECOND, due),
    )
