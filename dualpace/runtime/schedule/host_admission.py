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
    """Both tiers as they are. A round of decodes in HBM would take `round_s` seconds."""

    resident: int  # requests that decode in HBM
    on_host: int
    host_tokens: int  # KV tokens of those
    behind: int  # prompts that wait
    answer: float  # tokens that a resident is expected to make in all, mean
    context: float  # KV tokens of a resident, mean
    round_s: float

    @property
    def others(self) -> int:
        """Who loses when the GPU does."""
        return self.resident + self.behind


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
        that this prompt can count on: half of those who wait, and of those whose prompts can be
        computed while it decodes. If some size wins, it is open to all.
        """
        peak = finish_peak(request, outputs)
        if self.times is None or not draft.queue or peak > draft.view.gpu_capacity:
            return True  # HBM would never be free for it, or not for the end of a decode
        tiers, most = tiers_of(draft, self._times), draft.view.limits.cpu_rows
        rows = min(tiers.on_host + 1, most)
        meanwhile = (
            tiers.answer * self._iteration_s(tiers, rows) / self._times.prefill(tiers.context)
        )
        company = min(int(min(tiers.behind, meanwhile) / 2), most)
        while rows < company:
            if self._wins(tiers, rows):
                return True
            rows *= 2
        return self._wins(tiers, max(company, min(tiers.on_host + 1, most)))

    def _wins(self, tiers: Tiers, rows: int) -> bool:
        """Whether a host batch of so many rows brings more than it costs, by seconds a token.

        A request leaves HBM every `answer / resident` rounds. So with each token of its answer, one
        that waits for that costs all behind it the GPU time of a token in HBM. On the host a token
        costs all others its share of the assists instead, and comes later. Both sides grow with
        the answer, so its length does not matter.
        """
        in_hbm_s, saved_s = tiers.round_s / tiers.resident, self._saved_s(tiers, rows)
        later_s = self._iteration_s(tiers, rows) - tiers.round_s
        gained_s = tiers.behind * in_hbm_s + tiers.others * saved_s
        return ARRIVALS * gained_s > later_s

    def calls_home(self, draft: Draft) -> bool:
        """While the tier loses at its present size, and no more prompts wait than it has requests.

        A request that leaves HBM whole sends later ones there, so those on the host would finish
        sooner at home. Each that comes home keeps all who wait from one place; with more of them
        than of these, who wait lose more by it.
        """
        on_host = len(draft.view.cpu_running) + len(draft.view.cpu_waiting)
        if self.times is None or len(draft.view.waiting) > on_host:
            return False
        if not draft.queue:
            return True
        tiers = tiers_of(draft, self._times)
        return not self._wins(tiers, tiers.on_host)

    def lets_assist(self, view: View, rows: int) -> bool:
        """While decodes in HBM lose no more tokens by it than there are rows."""
        queue = view.gpu_running
        if self.times is None or not queue:
            return True
        round_s = self.times.gpu_decode_s(len(queue), sum([r.kv_len for r in queue]))
        return self.times.assist_pays(rows, len(queue), round_s)

    @property
    def _times(self) -> StepTimes:
        assert self.times is not None
        return self.times

    def _saved_s(self, tiers: Tiers, rows: int) -> float:
        """GPU time of a token that is made on the host, by a batch of so many rows, not in HBM."""
        assist_s = self._times.assist(rows) if self._assisted(tiers, rows) else 0.0
        return tiers.round_s / tiers.resident - assist_s / rows

    def _iteration_s(self, tiers: Tiers, rows: int) -> float:
        """A CPU iteration when those on the host have been joined by others like the residents."""
        kv_tokens = tiers.host_tokens + max(rows - tiers.on_host, 0) * tiers.context
        assisted = self._assisted(tiers, rows)
        return self._times.cpu_decode_s(rows, kv_tokens, tiers.round_s, assisted)

    def _assisted(self, tiers: Tiers, rows: int) -> bool:
        return self._times.assist_pays(rows, tiers.resident, tiers.round_s)


def tiers_of(draft: Draft, times: StepTimes) -> Tiers:
    """With the decisions of the draft so far."""
    view, queue, prompts = draft.view, draft.queue, draft.round.prefill_cpu
    resident = max(len(queue), 1)
    kv_tokens = sum([r.kv_len for r in queue])
    on_host = [*view.cpu_running, *view.cpu_waiting, *draft.round.swap_out]
    return Tiers(
        resident=resident,
        on_host=len(on_host) + len(prompts),
        host_tokens=sum([r.kv_len for r in on_host]) + sum([p.num_tokens for p in prompts]),
        behind=max(len(view.waiting) - len(prompts) - len(draft.round.prefill_gpu), 1),
        answer=sum([r.estimated_output for r in queue]) / resident,
        context=kv_tokens / resident,
        round_s=times.gpu_decode_s(resident, kv_tokens),
    )
