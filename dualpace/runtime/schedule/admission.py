"""Whether the host tier brings more than it costs: beyond the paper, which sends a prompt to the
host whenever HBM is full.

A host token may be slow, and its assists take GPU time from everybody, however few rows share
them. What a request would gain and cost on the host is estimated in request-seconds from predicted
step times; the tier takes it only if it gains. Knows no queue verbs and no device.
"""

from dataclasses import dataclass

from dualpace.runtime.schedule.draft import Draft
from dualpace.runtime.step_times import StepTimes
from dualpace.runtime.types import BLOCK_TOKENS, Request, blocks_for


MARGIN = 1.5  # a win must be clear: the estimates are rough, and a tier that is idle costs nothing


@dataclass(frozen=True, slots=True)
class Prospect:
    """One request on the host instead of in HBM, in seconds."""

    round_s: float  # a GPU round of decodes now
    slower_s: float  # how much later its remaining tokens would end
    assists_s: float  # GPU time that they would cost, its share of each iteration's assists
    relieved_s: float  # GPU time that they would cost in HBM, its share of each round
    resident: int  # requests that decode on the GPU
    behind: int  # prompts that wait, the candidate included

    @property
    def others(self) -> int:
        """Who loses when the GPU does."""
        return self.resident + self.behind


class HostAdmission:
    """Judges candidates for the host by predicted step times."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def takes_prompt(self, draft: Draft, request: Request, outputs: int) -> bool:
        """Whether a prompt that HBM has no room for should not wait for it.

        Waiting costs everybody behind it as long as HBM needs to make room. On the host its tokens
        are slower, and the GPU pays for assists instead of for rows.
        """
        short = blocks_for(request.prefill_len) - (draft.free - draft.marked_blocks)
        rounds = rounds_until_free(draft.queue, short)
        if rounds is None:
            return True
        p = self._prospect(draft, request.prefill_len, outputs - request.num_output, starts=True)
        if p.assists_s >= p.relieved_s:
            return False
        gained_s = p.behind * rounds * p.round_s + p.others * (p.relieved_s - p.assists_s)
        return gained_s > MARGIN * p.slower_s

    def takes_victim(self, draft: Draft, request: Request) -> bool:
        """Whether a request that must leave HBM should go on on the host, not be recomputed.

        Recomputing costs everybody its prefill.
        """
        left = request.estimated_output - request.num_output - request.in_flight
        p = self._prospect(draft, request.kv_len, left)
        again_s = self._times.prefill(request.kv_len) * p.others
        return p.slower_s + p.others * p.assists_s < again_s

    def _prospect(self, draft: Draft, kv_len: int, outputs: int, starts: bool = False) -> Prospect:
        """`starts`: others of those who wait would follow it to the host."""
        view, times = draft.view, self._times
        resident = max(len(draft.queue), 1)
        round_s = times.gpu_decode_s(resident, sum([r.kv_len for r in draft.queue]))
        on_host = [*view.cpu_running, *view.cpu_waiting, *draft.round.swap_out]
        prompts = draft.round.prefill_cpu
        rows, most = len(on_host) + len(prompts), view.limits.cpu_rows
        kv_tokens = sum([r.kv_len for r in on_host]) + sum([p.num_tokens for p in prompts])
        iteration_s = times.cpu_decode_s(min(rows + 1, most), kv_tokens + kv_len, round_s)
        behind = max(len(view.waiting) - len(prompts) - len(draft.round.prefill_gpu), 0)
        sharing = rows + 1
        if starts:
            # Assists cost as much for few rows, so a tier that is to start needs company: half of
            # those who wait, and of those whose prompts can be computed while this one decodes.
            meanwhile = outputs * iteration_s / times.prefill(kv_len)
            sharing = max(sharing, int(min(behind, meanwhile) / 2))
        sharing = min(sharing, most)
        return Prospect(
            round_s=round_s,
            slower_s=outputs * (iteration_s - round_s),
            assists_s=outputs * times.assist(sharing) / sharing,
            relieved_s=outputs * round_s / resident,
            resident=resident,
            behind=max(behind, 1),
        )


def rounds_until_free(queue: list[Request], short: int) -> int | None:
    """Rounds of decodes until `short` more HBM blocks are free, as requests end; None if never."""
    ends = sorted([(r.estimated_output - r.num_output - r.in_flight, r.peak_blocks) for r in queue])
    freed, left = 0, len(ends)
    for rounds, blocks in ends:
        freed += blocks
        left -= 1
        if freed - left * rounds / BLOCK_TOKENS > short:  # those left have grown
            return max(rounds, 1)
    return None
