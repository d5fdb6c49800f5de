"""Appendix B's sampling: W warm-ups, then R repeats of I invocations, the slowest rank counting
(Equations 10 and 11). Knows nothing about what it times."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Effort:
    """`max_seconds` bounds one primitive: fewer invocations where they would take longer."""

    warmups: int
    invocations: int
    repeats: int
    max_seconds: float

    def affordable(self, call_s: float) -> int:
        """Invocations of one repeat when a call takes `call_s`."""
        fit = int(self.max_seconds / self.repeats / max(call_s, 1e-9))
        return max(1, min(self.invocations, fit))


@dataclass(frozen=True, slots=True)
class Sample:
    """One primitive at one size."""

    ms: float  # M_x: the mean of the repeats
    repeats_ms: list[float]  # l_x,j
    invocations: int  # a repeat

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def critical_path(ranks: Sequence[float]) -> float:
    """The interval of the slowest rank (Equation 10)."""
    return max(ranks)


def sample(run: Callable[[int], Sequence[float]], effort: Effort) -> Sample:
    """`run(i)` does invocation i and returns its seconds on each rank."""
    warm = [critical_path(run(0))]
    while len(warm) < effort.warmups and sum(warm) < effort.max_seconds:
        warm.append(critical_path(run(len(warm))))
    count = effort.affordable(min(warm))
    repeats = []
    for _ in range(effort.repeats):
        totals = [math.fsum(rank) for rank in zip(*map(run, range(count)), strict=True)]
        repeats.append(1e3 * critical_path(totals) / count)
    return Sample(fmean(repeats), repeats, count)


class Team(Protocol):
    """The ranks that time the same calls; see team.py."""

    def meet(self) -> None: ...

    def of_ranks(self, seconds: float) -> Sequence[float]: ...


def wall_clock(call: Callable[[int], object], team: Team) -> Callable[[int], Sequence[float]]:
    """Times a call that all ranks begin together."""

    def run(i: int) -> Sequence[float]:
        team.meet()
        started = time.perf_counter()
        call(i)
        return team.of_ranks(time.perf_counter() - started)

    return run
