"""Continuous batching in HBM alone: chunked prefill, recompute preemption. The baseline without a
host tier.
"""

from dualpace.block import blocks_for
from dualpace.runtime.schedule.rounds import CpuRound, GpuRound, Prefill
from dualpace.runtime.schedule.view import View, next_growth


class GpuOnly:
    """Running decodes first; prompts in chunks up to the soft token limit; the youngest is
    dropped under pressure.
    """

    uses_host = False
    has_cpu_engine = False
    guards_host = False

    def gpu_round(self, view: View) -> GpuRound:
        decision = GpuRound(decode=list(view.gpu_running))
        free = view.gpu_free - next_growth(view.gpu_running)
        if free < 0 and view.rounds_in_flight:
            return GpuRound()  # the round in flight may end some: apply it first
        while free < 0:
            victim = decision.decode.pop()
            free += len(victim.blocks) + victim.next_growth
            decision.preempt.append(victim)
        if not decision.preempt:
            admit_chunks(view, decision, free)
        return decision

    def cpu_round(self, view: View) -> CpuRound:
        return CpuRound()


def admit_chunks(view: View, decision: GpuRound, free: int) -> None:
    """Prompts in FIFO order, each with all its blocks at once and as many tokens as the soft
    limit leaves.
    """
    rows = tokens = len(decision.decode)
    for request in view.waiting:
        left = view.limits.soft_tokens - tokens
        if rows >= view.limits.gpu_rows or left <= 0:
            return
        if not request.blocks:
            free -= blocks_for(request.prefill_len)
            if free < 0:
                return
        chunk = min(request.prefill_len - request.kv_len, left)
        decision.prefill_gpu.append(Prefill(request, chunk, view.estimated_output(request)))
        rows, tokens = rows + 1, tokens + chunk
