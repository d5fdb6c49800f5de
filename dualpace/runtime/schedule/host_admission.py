"""Whether the host tier brings more than it costs: beyond the paper, which sends a prompt to the
host whenever HBM is full, and assists a batch by its size alone.

A token is slower on the host, and the assists of an iteration take GPU time from everybody, however
few rows share them. Both are judged by predicted step times. Knows no queue verbs and no device.
"""

from dataclasses import dataclass

from dualpace.runtime.schedule.draft import Draft
from dualpace.runtime.schedule.view import View, finish_peak
from dualpace.runtime.step_times import StepTimes
from dualpace.runtime.types import Request

ARRIVALS = 1.5  # who loses by a wait, for each that waits now: more come before the queue is gone


@dataclass(frozen=True, slots=True)
class Tiers:
    """Both tiers as they are, and what their steps take. A round of the decodes in HBM would take
    `round_s` seconds.
    """

    times: StepTimes
    resident: int  # requests that decode in HBM
    on_host: int
    host_tokens: int  # KV tokens of those
    behind: int  # prompts that wait
    answer: float  # tokens that a resident is expected to make in all, mean
    context: float  # KV tokens of a resident, mean
    round_s: float

    def is_assisted(self, rows: int) -> bool:
        return self.times.assist_pays(rows, self.resident, self.round_s)

    def iteration_s(self, rows: int) -> float:
        """A CPU iteration when those on the host have been joined by others like the residents."""
        kv_tokens = self.host_tokens + max(rows - self.on_host, 0) * self.context
        return self.times.cpu_decode_s(rows, kv_tokens, self.round_s, self.is_assisted(rows))

    def saved_s(self, rows: int) -> float:
        """GPU time of a token that is made on the host, by a batch of so many rows, not in HBM."""
        assist_s = self.times.assist(rows) if self.is_assisted(rows) else 0.0
        return self.round_s / self.resident - assist_s / rows

    def wins(self, rows: int) -> bool:
        """Whether a host batch of so many rows brings more than it costs, by seconds a token.

        A request leaves HBM every `answer / resident` rounds. So with each token of its answer, one
        that waits for that costs all behind it the GPU time of a token in HBM. On the host a token
        costs all others its share of the assists instead, and comes later. Both sides grow with
        the answer, so its length does not matter.
        """
        others = self.resident + self.behind  # who lose when the GPU does
        gained_s = self.behind * self.round_s / self.resident + others * self.saved_s(rows)
        return ARRIVALS * gained_s > self.iteration_s(rows) - self.round_s

    def company(self, rows: int) -> int:
        """How many may join them: half of those who wait, and of those whose prompts can be
        computed while a batch of so many rows decodes.
        """
        prompts = self.answer * self.iteration_s(rows) / self.times.prefill(self.context)
        return int(min(self.behind, prompts) / 2)


class ProfiledAdmission:
    """A `draft.HostAdmission` that judges by predicted step times. While `times` is None, before
    any are known, the host takes whoever fits and is assisted by size alone.

    Who must leave HBM goes to the host in any case: nobody else loses by a batch that is assisted
    only where that costs less than its tokens in HBM did, and all would wait for a recomputation.
    """

    def __init__(self, times: StepTimes | None) -> None:
        self.times = times

    def takes_prompt(self, draft: Draft, request: Request, outputs: int) -> bool:
        """Whether a prompt that HBM has no room for should not wait for it.

        Few rows are not assisted and the slower, and KV takes the longer to read the more there is.
        So the tier is judged by a size that it would reach, between what it has now and the company
        that this prompt can count on. If some size wins, it is open to all.
        """
        peak = finish_peak(request, outputs)
        if self.times is None or not draft.queue or peak > draft.view.gpu_capacity:
            return True  # HBM would never be free for it, or not for the end of a decode
        tiers, most = tiers_of(draft, self.times), draft.view.limits.cpu_rows
        rows = min(tiers.on_host + 1, most)
        largest = max(min(tiers.company(rows), most), rows)
        doubled = [rows << i for i in range((largest // rows).bit_length())]
        return any(tiers.wins(size) for size in (*doubled, largest))

    def calls_home(self, draft: Draft) -> bool:
        """While the tier loses at its present size, and no more prompts wait than it has requests.

        It would finish them sooner at home, and each that comes costs all who wait one place: with
        more of them than of these, they lose more by it.
        """
        view = draft.view
        if self.times is None or len(view.waiting) > len(view.cpu_running) + len(view.cpu_waiting):
            return False
        if not draft.queue:
            return True
        tiers = tiers_of(draft, self.times)
        return not tiers.wins(tiers.on_host)

    def lets_assist(self, view: View, rows: int) -> bool:
        """While decodes in HBM lose no more tokens by it than there are rows."""
        queue = view.gpu_running
        if self.times is None or not queue:
            return True
        round_s = self.times.gpu_decode_s(len(queue), sum([r.kv_len for r in queue]))
        return self.times.assist_pays(rows, len(queue), round_s)


def tiers_of(draft: Draft, times: StepTimes) -> Tiers:
    """With the decisions of the draft so far; somebody decodes in HBM."""
    view, queue, prompts = draft.view, draft.queue, draft.round.prefill_cpu
    kv_tokens = sum([r.kv_len for r in queue])
    on_host = [*view.cpu_running, *view.cpu_waiting, *draft.round.swap_out]
    return Tiers(
        times=times,
        resident=len(queue),
        on_host=len(on_host) + len(prompts),
        host_tokens=sum([r.kv_len for r in on_host]) + sum([p.num_tokens for p in prompts]),
        behind=max(len(view.waiting) - len(prompts) - len(draft.round.prefill_gpu), 1),
        answer=sum([r.estimated_output for r in queue]) / len(queue),
        context=kv_tokens / len(queue),
        round_s=times.gpu_decode_s(len(queue), kv_tokens),
    )
