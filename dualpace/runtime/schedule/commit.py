"""A.1.7 and A.2.5: a decision becomes blocks, queue places and rows. The only code that allocates
KV.

Decides nothing: an allocation that does not fit is a bug of the decision and trips an assertion.
Every verb runs to its end without waiting, so that either engine's loop may change both pools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualpace.runtime.schedule.rounds import (
    CpuRound,
    CpuStep,
    GpuRound,
    GpuStep,
    Prefill,
    Row,
    RowKind,
    Transfer,
    TransferKind,
)
from dualpace.runtime.schedule.view import finish_peak
from dualpace.runtime.types import BLOCK_TOKENS, Owner, Phase, Request, blocks_for

if TYPE_CHECKING:
    from dualpace.runtime.schedule.state import State

DECODE = RowKind.DECODE  # a global is found faster than an enum's member, 256 times a round


def commit_gpu(state: State, decision: GpuRound) -> GpuStep | None:
    """Commits a GPU decision; None if it holds neither rows nor transfers."""
    for request in decision.withdraw:
        state.unmark(request)
    for request in decision.preempt:
        state.recompute(request, state.preempted_gpu)
    evictions = [swap_out(state, request) for request in decision.swap_out]
    due: list[Request] = []
    rows = decode_rows(state, decision.decode, evictions, due)
    arrivals = [swap_in(state, request) for request in decision.swap_in]
    rows += decode_rows(state, decision.swap_in, [], due)
    rows += [prefill_to_gpu(state, prefill, due) for prefill in decision.prefill_gpu]
    rows += [prefill_to_cpu(state, prefill, due) for prefill in decision.prefill_cpu]
    lockstep = host_sub_batches(state, decision.host, due) if any(decision.host) else ([], [])
    for request in decision.mark:
        request.marked = True
        state.marked.append(request)
    transfers = evictions + arrivals
    if not (rows or transfers or any(lockstep)):
        return None
    state.gpu_rounds += 1
    step = GpuStep(
        number=state.gpu_rounds,
        rows=rows,
        transfers=transfers,
        snapshot=state.snapshot(),
        prefill_gpu=[p.request.id for p in decision.prefill_gpu],
        prefill_cpu=[p.request.id for p in decision.prefill_cpu],
        swap_out=[r.id for r in decision.swap_out],
        swap_in=[r.id for r in decision.swap_in],
        marked=[r.id for r in decision.mark],
        preempted=state.preempted_gpu,
        host_rows=lockstep,
        exclusive=decision.exclusive or bool(state.preempted_gpu),
        due=due,
    )
    state.preempted_gpu = []
    return step


def commit_cpu(state: State, decision: CpuRound) -> CpuStep | None:
    """Commits a CPU decision; None if its batch is empty."""
    if not (decision.decode or decision.displaced or decision.preempt):
        return None  # nothing decided: rows in lockstep with the GPU (neo) stay where they are
    for request in decision.preempt:
        state.cpu_waiting.remove(request)
        state.recompute(request, state.preempted_cpu)
    for _ in range(decision.admitted):
        state.cpu_waiting.popleft()
    state.cpu_waiting.extendleft(reversed(decision.displaced))
    state.set_cpu_running(list(decision.decode))
    if not decision.decode:
        return None
    due: list[Request] = []
    rows = host_rows(state, decision.decode, DECODE, due)
    state.cpu_rounds += 1
    step = CpuStep(state.cpu_rounds, rows, state.snapshot(), state.preempted_cpu, due)
    state.preempted_cpu = []
    return step


def swap_out(state: State, request: Request) -> Transfer:
    """Takes the host destination before the GPU lets go; the CPU sees the request after the
    report.
    """
    source = request.blocks
    count = blocks_for(request.kv_len)
    request.blocks = state.host_pool.allocate(count)
    state.planned += count
    state.leave_gpu_queue(request)
    request.owner = Owner.CPU
    state.cpu_waiting.append(request)
    state.gpu_vacating += len(source)
    return state.start_transfer(
        request, TransferKind.SWAP_OUT, source[:count], request.blocks, held=source
    )


def swap_in(state: State, request: Request) -> Transfer:
    """Takes the HBM destination before the host lets go; host blocks are free after the report."""
    source = request.blocks
    state.cpu_waiting.remove(request)
    state.unmark(request)
    count = blocks_for(request.kv_len)
    request.blocks = state.gpu_pool.allocate(blocks_for(request.kv_len + 1))
    request.owner = Owner.GPU
    state.join_gpu_queue(request)
    return state.start_transfer(
        request, TransferKind.SWAP_IN, source[:count], request.blocks[:count], held=source
    )


def decode_rows(
    state: State, requests: list[Request], evictions: list[Transfer], due: list[Request]
) -> list[Row]:
    """One row each, with the block for its next token from the free list, else from this round's
    victims. Like all that make rows, adds to `due` whoever's token reaches its estimate.
    """
    rows = []
    for request in requests:
        kv_len, blocks = request.kv_len, request.blocks
        if kv_len // BLOCK_TOKENS >= len(blocks):
            blocks.append(next_block(state, evictions))
        request.kv_len = kv_len + 1
        request.in_flight += 1
        rows.append(Row(request, DECODE, kv_len, 1, blocks))
        if request.num_output + request.in_flight >= request.estimated_output:
            if request.num_output + request.in_flight >= request.max_tokens:
                state.leave_gpu_queue(request)
                state.ending[request.id] = request
            else:
                due.append(request)
    return rows


def next_block(state: State, evictions: list[Transfer]) -> int:
    if state.gpu_pool.num_free:
        return state.gpu_pool.allocate(1)[0]
    donor = next(t for t in evictions if t.held)
    state.gpu_vacating -= 1
    return donor.held.pop()


def admit(state: State, prefill: Prefill) -> Request:
    """Fixes the estimate that the admission was judged by."""
    request = prefill.request
    request.estimated_output = prefill.estimated_output
    request.peak_blocks = finish_peak(request, prefill.estimated_output)
    return request


def prefill_to_gpu(state: State, prefill: Prefill, due: list[Request]) -> Row:
    """A prompt or its next chunk; at the first, all blocks of the prompt; after the last, GPU
    decode.
    """
    request = prefill.request
    if not request.blocks:
        admit(state, prefill)
        state.waiting.remove(request)
        state.waiting.appendleft(request)  # a chunked prompt stays at the head until its last chunk
        request.blocks = state.gpu_pool.allocate(blocks_for(request.prefill_len))
    start = request.kv_len
    request.kv_len += prefill.num_tokens
    last = request.kv_len == request.prefill_len
    if last:
        state.waiting.remove(request)
        request.phase = Phase.DECODING
        request.in_flight += 1
        if request.num_output + 1 >= request.max_tokens:
            state.ending[request.id] = request
        else:
            state.join_gpu_queue(request)
            if request.num_output + 1 >= request.estimated_output:
                due.append(request)
    else:
        request.pins += 1
    return Row(request, RowKind.PREFILL_GPU, start, prefill.num_tokens, request.blocks, sample=last)


def prefill_to_cpu(state: State, prefill: Prefill, due: list[Request]) -> Row:
    """A whole prompt through staging to its host blocks; unready in CPU waiting until the copies
    are done.
    """
    request = admit(state, prefill)
    state.waiting.remove(request)
    request.blocks = state.host_pool.allocate(blocks_for(prefill.num_tokens))
    state.planned += len(request.blocks)
    request.kv_len = prefill.num_tokens
    request.in_flight += 1
    request.phase, request.owner = Phase.DECODING, Owner.CPU
    if request.num_output + 1 >= request.max_tokens:
        state.ending[request.id] = request
    else:
        state.cpu_waiting.append(request)
        if request.num_output + 1 >= request.estimated_output:
            due.append(request)
    copies = state.start_transfer(request, TransferKind.PREFILL_CPU, [], request.blocks, held=[])
    state.staging.add(copies.id)
    return Row(
        request, RowKind.PREFILL_CPU, 0, prefill.num_tokens, request.blocks, transfer_id=copies.id
    )


def host_rows(
    state: State, requests: list[Request], kind: RowKind, due: list[Request]
) -> list[Row]:
    """Decode rows on host KV, each with the one block that its next token needs and no more."""
    rows = []
    for request in requests:
        kv_len, blocks = request.kv_len, request.blocks
        if kv_len // BLOCK_TOKENS >= len(blocks):
            blocks += state.host_pool.allocate(1)
        request.kv_len = kv_len + 1
        request.in_flight += 1
        rows.append(Row(request, kind, kv_len, 1, blocks))
        if request.num_output + request.in_flight >= request.estimated_output:
            due.append(request)
    return rows


def host_sub_batches(
    state: State, sub_batches: tuple[list[Request], list[Request]], due: list[Request]
) -> tuple[list[Row], list[Row]]:
    """Host rows in lockstep with the GPU (neo): they are the running queue until the next round."""
    chosen = {r.id for batch in sub_batches for r in batch}
    everyone = [*state.cpu_running, *state.cpu_waiting]
    state.set_cpu_running([r for r in everyone if r.id in chosen])
    state.cpu_waiting.clear()
    state.cpu_waiting.extend(r for r in everyone if r.id not in chosen)
    first, second = (host_rows(state, batch, RowKind.HOST_DECODE, due) for batch in sub_batches)
    return first, second
