"""NEO's GPU-gated asymmetric pipeline (section 3.1, Figure 4, Equation 1), to compare with.

A GPU round carries host-resident decodes in two sub-batches, in lockstep: sub-batch 0 beside the
prompts and the GPU-resident decodes, sub-batch 1 by itself. The GPU runs all dense work, the CPU
attention over host KV. There is no CPU engine: host-resident requests move only with a GPU round
that hides them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dualpace.block import blocks_for
from dualpace.errors import ConfigError
from dualpace.runtime.schedule.rounds import CpuRound, GpuRound, Prefill
from dualpace.runtime.schedule.view import View, next_growth
from dualpace.runtime.types import Request

SWAP_IN_BELOW = 0.95  # of the HBM blocks: leaves some for the next tokens


class Predictor(Protocol):
    """Times of one layer in seconds, from a profile. All sizes may be 0."""

    num_layers: int

    def linear_s(self, num_rows: int) -> float:
        """Pre- and post-attention of that many token rows: T^l."""

    def gpu_attention_s(self, prefills: Sequence[tuple[int, int]], decode_tokens: int) -> float:
        """T^ga of prompts (tokens now, context after) and of decodes over `decode_tokens` KV
        tokens in all.
        """

    def cpu_attention_s(self, num_requests: int, kv_tokens: int) -> float:
        """T^ca of that many host rows over `kv_tokens` KV tokens in all, activations' way
        included.
        """

    def post_layer_s(self, num_rows: int) -> float:
        """Final norm, head and sampling of that many rows, once an iteration."""


class Neo:
    """One scheduler for both tiers; `predictor` tells what overlaps."""

    uses_host = True
    has_cpu_engine = False  # so a request that HBM cannot hold would wait for GPU work for ever
    guards_host = False

    def __init__(
        self,
        predictor: Predictor | None = None,
        skips_longer: bool = True,
        needs_gpu_work: bool = True,
    ) -> None:
        if predictor is None:
            raise ConfigError("policy=neo needs predicted times of a layer")
        self._predictor = predictor
        self._skips_longer = skips_longer  # after a refusal, pass over all that are as long
        self._needs_gpu_work = needs_gpu_work  # no host rows in a round without GPU rows

    def gpu_round(self, view: View) -> GpuRound:
        if view.staging_busy or view.gpu_vacating:
            return GpuRound()
        plan = HostPlan(view)
        decision = GpuRound()
        free = keep_gpu_decodes(view, plan, decision)
        free = swap_in_head(view, plan, decision, free)
        admit_prompts(view, plan, decision, free)
        if decision.decode or decision.swap_in or decision.prefill_gpu or decision.prefill_cpu:
            add_host_rows(view, plan, decision, self._predictor, self._skips_longer)
        elif not self._needs_gpu_work and not decision.preempt:
            decision.host = host_rows_alone(view, plan)
        return decision

    def cpu_round(self, view: View) -> CpuRound:
        return CpuRound()


class HostPlan:
    """What a round has left of the host pool, and who is on it in arrival order.

    Those in a round in flight count as if they were back from it: a round that takes one of them
    moves KV or carries host rows, and is not scheduled behind that one.
    """

    def __init__(self, view: View) -> None:
        self.free = view.host_free
        flying = [r for r in view.cpu_running if r.num_output + r.in_flight < r.max_tokens]
        self.residents = sorted([*flying, *view.cpu_waiting], key=lambda r: r.order)


def keep_gpu_decodes(view: View, plan: HostPlan, decision: GpuRound) -> int:
    """All GPU decodes, less the newest while their next tokens do not fit; those swap out, or
    recompute.
    """
    decision.decode = list(view.gpu_running)
    free = view.gpu_free - next_growth(view.gpu_running)
    if free < 0 and view.rounds_in_flight:
        decision.decode = []
        return 0
    while free < 0:
        victim = next((r for r in reversed(decision.decode) if r.ready), None)
        if victim is None:  # the rest were just swapped in: wait for the report
            decision.decode = []
            break
        decision.decode.remove(victim)
        free += len(victim.blocks) + victim.next_growth
        blocks = blocks_for(victim.kv_len)
        if blocks <= plan.free and not decision.preempt:
            plan.free -= blocks
            decision.swap_out.append(victim)
        else:
            decision.preempt.append(victim)
    if decision.swap_out:  # vacated blocks serve this round's decodes only
        return min(free, view.gpu_free - next_growth(decision.decode))
    return free


def swap_in_head(view: View, plan: HostPlan, decision: GpuRound, free: int) -> int:
    """From the head of the host queue while HBM is not nearly full; never in a round that swaps
    out. Decided beside a round in flight too, which then has none behind it: else the host queue
    would stand still for as long as decodes are scheduled ahead.
    """
    if decision.swap_out or decision.preempt:
        return free
    rows = len(decision.decode)
    keep = int(view.gpu_capacity * (1 - SWAP_IN_BELOW))
    if not decision.decode:
        keep = 0  # a head that needs nearly all of HBM would wait for ever
    for request in plan.residents:
        blocks = blocks_for(request.kv_len + 1)
        if request.pins or rows >= view.limits.gpu_rows or blocks > free - keep:
            break
        decision.swap_in.append(request)
        free -= blocks
        rows += 1
    return free


def admit_prompts(view: View, plan: HostPlan, decision: GpuRound, free: int) -> None:
    """Prompts in FIFO order, to HBM while they fit, then all to the host."""
    limits = view.limits
    rows = tokens = len(decision.decode) + len(decision.swap_in)
    staged = 0
    if decision.preempt:
        return
    for request in view.waiting:
        if rows >= limits.gpu_rows or tokens >= limits.soft_tokens:
            return
        length, left = request.prefill_len - request.kv_len, limits.hard_tokens - tokens
        blocks = blocks_for(request.prefill_len)
        estimate = view.estimated_output(request)
        if request.blocks or (not decision.prefill_cpu and blocks <= free):
            chunk = min(length, left)
            if chunk < length <= limits.hard_tokens:
                return
            free -= 0 if request.blocks else blocks
            decision.prefill_gpu.append(Prefill(request, chunk, estimate))
            if chunk < length:
                return
        else:
            full = len(plan.residents) + len(decision.prefill_cpu) >= limits.host_admission
            if full or length > min(left, limits.staging - staged) or blocks > plan.free:
                return
            plan.free -= blocks
            staged += length
            decision.prefill_cpu.append(Prefill(request, length, estimate))
        rows, tokens = rows + 1, tokens + length


@dataclass(slots=True)
class SubBatches:
    """Predicted times of one layer with the host rows chosen so far."""

    predictor: Predictor
    num_rows: int  # prompt tokens and GPU decodes
    gpu_attention_s: float
    host: tuple[list[Request], list[Request]] = field(default_factory=lambda: ([], []))
    kv_tokens: list[int] = field(default_factory=lambda: [0, 0])
    linear_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        pairs = [self._times(place) for place in (0, 1)]
        self.linear_s, self.cpu_s = [list(times) for times in zip(*pairs, strict=True)]

    def margins(self) -> tuple[float, float]:
        """Equation 1: how long CPU attention 1 and CPU attention 0 stay hidden."""
        linear, cpu = self.linear_s, self.cpu_s
        return linear[0] - cpu[1], linear[1] + self.gpu_attention_s - cpu[0]

    def layer_s(self) -> float:
        """Figure 4: linear 0 beside CPU attention 1, then linear 1 and GPU attention beside CPU
        attention 0.
        """
        linear, cpu = self.linear_s, self.cpu_s
        return max(linear[0], cpu[1]) + max(linear[1] + self.gpu_attention_s, cpu[0])

    def try_put(self, place: int, request: Request) -> bool:
        """Adds the request unless a margin turns negative; whether it did."""
        before = self.linear_s[place], self.cpu_s[place]
        tokens = request.kv_len + 1
        self.host[place].append(request)
        self.kv_tokens[place] += tokens
        self.linear_s[place], self.cpu_s[place] = self._times(place)
        if min(self.margins()) >= 0:
            return True
        self.host[place].pop()
        self.kv_tokens[place] -= tokens
        self.linear_s[place], self.cpu_s[place] = before
        return False

    def _times(self, place: int) -> tuple[float, float]:
        """Dense work and CPU attention of a sub-batch."""
        rows = len(self.host[place])
        linear = self.predictor.linear_s(rows if place else self.num_rows + rows)
        return linear, self.predictor.cpu_attention_s(rows, self.kv_tokens[place])


def host_rows_alone(view: View, plan: HostPlan) -> tuple[list[Request], list[Request]]:
    """All ready host decodes in two sub-batches of like KV, that hide each other's dense work."""
    host: tuple[list[Request], list[Request]] = ([], [])
    kv_tokens = [0, 0]
    for request in plan.residents[: view.limits.cpu_rows]:
        if not request.pins and request.next_growth <= plan.free:
            plan.free -= request.next_growth
            place = 1 if kv_tokens[1] < kv_tokens[0] else 0
            host[place].append(request)
            kv_tokens[place] += request.kv_len + 1
    return host


def add_host_rows(
    view: View, plan: HostPlan, decision: GpuRound, predictor: Predictor, skips_longer: bool
) -> None:
    """Host decodes that both overlaps of Equation 1 hide, if the pipeline then serves more rows a
    second.

    Each goes where the margin is larger and is taken back when a margin turns negative; from then
    on those as long or longer are passed over, if NEO's rule for that is on.
    """
    prefills = [
        (p.num_tokens, p.request.kv_len + p.num_tokens)
        for p in decision.prefill_gpu + decision.prefill_cpu
    ]
    decodes = decision.decode + decision.swap_in
    attention = predictor.gpu_attention_s(prefills, sum([r.kv_len + 1 for r in decodes]))
    batches = SubBatches(predictor, len(decodes) + sum([n for n, _ in prefills]), attention)
    alone_s = batches.layer_s()
    shortest_refused = None
    moving = {r.id for r in decision.swap_in}
    chosen = 0
    for request in plan.residents:
        if chosen >= view.limits.cpu_rows:
            break
        too_long = shortest_refused is not None and request.kv_len >= shortest_refused
        if request.pins or request.id in moving or too_long or request.next_growth > plan.free:
            continue
        hidden_1, hidden_0 = batches.margins()
        place = 1 if hidden_1 >= hidden_0 else 0
        if not batches.try_put(place, request):
            shortest_refused = request.kv_len if skips_longer else None
            continue
        plan.free -= request.next_growth
        chosen += 1
    base = len(decodes) + len(prefills)

    def rate(rows: int, layer_s: float) -> float:
        return rows / (predictor.num_layers * layer_s + predictor.post_layer_s(rows))

    if chosen and rate(base + chosen, batches.layer_s()) > rate(base, alone_s):
        decision.host = batches.host
