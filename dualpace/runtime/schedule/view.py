"""What a policy may look at: read-only windows on the live queues and counts. Copies nothing,
decides nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dualpace.block import BLOCK_TOKENS, blocks_for
from dualpace.runtime.schedule.envelope import HostEnvelope
from dualpace.runtime.schedule.limits import Limits
from dualpace.runtime.types import Phase, Request


@dataclass(frozen=True, slots=True)
class View:
    """The state as it will be when every committed GPU round has run.

    Rows of a round in flight are already one token longer and those that reach their token limit
    with it are gone from the queues; blocks are free only when they really are. Counts are in
    blocks. Queues are live: read them during the round, keep none of them.
    """

    limits: Limits
    waiting: Sequence[Request]  # arrival order; a prompt in progress stays at its head
    gpu_running: Sequence[Request]  # arrival order; its tail is evicted first
    cpu_waiting: Sequence[Request]  # may hold unready ones
    cpu_running: Sequence[Request]
    marked: Sequence[Request]  # chosen for a later swap-in, running or yielded
    gpu_capacity: int
    gpu_free: int
    gpu_peak: int  # Equation 4: finish peaks of all GPU-owned requests
    gpu_vacating: int  # blocks of swapped-out requests whose copies are not reported yet
    host_free: int
    envelope: HostEnvelope
    rounds_in_flight: int  # GPU rounds not applied yet: 1 when this one is scheduled ahead
    transfers_in_flight: int
    staging_busy: bool  # Prefill-to-CPU copies are outstanding
    estimate: Callable[[int, int], int]  # (outputs so far, max_tokens) -> outputs expected in all

    @property
    def hbm_unpromised(self) -> int:
        """HBM blocks beyond the finish peaks of all GPU-owned requests."""
        return self.gpu_capacity - self.gpu_peak

    def estimated_output(self, request: Request) -> int:
        """Outputs expected in all of a request that is about to be prefilled."""
        return self.estimate(request.num_output, request.max_tokens)


def finish_peak(request: Request, estimated_output: int) -> int:
    """The paper's b-hat: the most blocks that the request is expected to need before it ends."""
    return max(
        blocks_for(request.prompt_len + estimated_output - 1),
        blocks_for(request.prefill_len),
        len(request.blocks),
        0 if request.phase is Phase.WAITING else request.kv_len // BLOCK_TOKENS + 1,
    )


def next_growth(requests: Iterable[Request]) -> int:
    """Blocks to allocate before the next decode step of all of them."""
    return sum([r.kv_len // BLOCK_TOKENS >= len(r.blocks) for r in requests])
