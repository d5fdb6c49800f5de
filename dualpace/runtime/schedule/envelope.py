"""The host KV envelope: Equations 2-4 of section 4.1 as one value. All in physical blocks."""

from collections.abc import Iterable
from dataclasses import dataclass

from dualpace.runtime.types import Request


@dataclass(frozen=True, slots=True)
class HostEnvelope:
    """`used + planned + growth + migration <= capacity` (Equation 2)."""

    capacity: int
    used: int  # materialized host KV
    planned: int = 0  # allocated, or about to be, and not yet materialized
    growth: int = 0  # what the CPU-running requests may still need (Equation 3)
    migration: int = 0  # what GPU-owned requests may need when they are evicted (Equation 4)

    @property
    def slack(self) -> int:
        """Blocks left under Equation 2; negative when a risen estimate has broken it."""
        return self.capacity - self.used - self.planned - self.growth - self.migration

    @property
    def holds(self) -> bool:
        return self.slack >= 0


def finish_growth(running: Iterable[Request]) -> int:
    """Equation 3: blocks that the CPU-running requests may still need before they end."""
    return sum([r.peak_blocks - len(r.blocks) for r in running])


def gpu_peak(queue: Iterable[Request]) -> int:
    """Equation 4: the summed finish peaks of the GPU-owned requests."""
    return sum([r.peak_blocks for r in queue])


def migration_reserve(tail_first: Iterable[Request], peak: int, capacity: int) -> int:
    """The host reserve of Equation 4's text for GPU-owned requests with summed finish peak `peak`.

    Scans the evictable requests from the eviction-priority tail and moves each finish peak to the
    reserve until the remainder fits in `capacity` blocks of HBM.
    """
    reserve = 0
    if peak > capacity:
        for request in tail_first:
            reserve += request.peak_blocks
            if peak - reserve <= capacity:
                break
    return reserve
