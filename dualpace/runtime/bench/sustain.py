"""Sustainable rates of a set of sweeps (section 6.1): what each policy or variant carries at the
paper's targets. Knows only the keys of results."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dualpace.runtime.bench.metrics import sustainable_rate

Result = dict[str, Any]

# Name, key, target in the key's unit.
TARGETS = (
    ("1 s/token", "mean_normalized_latency_s_per_token", 1.0),
    ("P99 TTFT 5 s", "p99_ttft_ms", 5000.0),
    ("P99 ITL 1.5 s", "p99_itl_ms", 1500.0),
)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One line of a figure: the same machine, workload and policy at several rates (requests/s)."""

    profile: str
    workload: str
    name: str  # the policy, or the variant's label
    results: tuple[Result, ...]  # by rate

    def sustains(self, key: str, target: float) -> tuple[float | None, str]:
        """(rate, reason if None): interpolated between measured rates, never extrapolated."""
        rates = [float(r["rate"]) for r in self.results]
        found = sustainable_rate(rates, [r[key] for r in self.results], target)
        return found.rate, found.reason

    @property
    def capacity(self) -> float:
        """The most requests/s that any point of the sweep completed."""
        return max(float(r["request_throughput"]) for r in self.results)


def sweeps(results: Sequence[Result]) -> list[Sweep]:
    """Results grouped into sweeps, in the order in which they first appear."""
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        name = result["variant"] or result["policy"]
        groups[result["profile"], result["workload"], name].append(result)
    return [
        Sweep(*key, tuple(sorted(group, key=lambda r: float(r["rate"]))))
        for key, group in groups.items()
    ]


def table(results: Sequence[Result]) -> list[str]:
    """Lines for people: sustainable rates at each target, and the reason where there is none."""
    lines = [f"{'machine, workload, policy':58}" + "".join(f"{t[0]:>15}" for t in TARGETS)]
    for sweep in sweeps(results):
        cells, reasons = [], []
        for name, key, target in TARGETS:
            rate, reason = sweep.sustains(key, target)
            cells.append(f"{rate:15.2f}" if rate is not None else f"{'-':>15}")
            if rate is None:
                reasons.append(f"{name}: {reason}")
        label = f"{sweep.profile}, {sweep.workload}, {sweep.name}"
        lines.append(f"{label:58}" + "".join(cells) + ("   " + "; ".join(reasons)).rstrip())
    return lines
