"""Sustainable rates of a set of sweeps (section 6.1): what each policy or variant carries at the
paper's targets. Knows only the keys of results."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dualpace.runtime.bench.metrics import sustainable_rate

Result = dict[str, Any]

Target = tuple[str, str, float]  # name, key, target in the key's unit

TARGETS: tuple[Target, ...] = (
    ("1 s/token", "mean_normalized_latency_s_per_token", 1.0),
    ("P99 TTFT 5 s", "p99_ttft_ms", 5000.0),
    ("P99 ITL 1.5 s", "p99_itl_ms", 1500.0),
    ("P99 TPOT 1.5 s", "p99_tpot_ms", 1500.0),
)
# A tenth of the paper's: a faster machine may never come near those within a short sweep.
TENTHS: tuple[Target, ...] = (
    ("0.1 s/token", "mean_normalized_latency_s_per_token", 0.1),
    ("P99 TTFT 0.5 s", "p99_ttft_ms", 500.0),
    ("P99 ITL 0.15 s", "p99_itl_ms", 150.0),
    ("P99 TPOT 0.15 s", "p99_tpot_ms", 150.0),
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

    def said(self, key: str, target: float) -> str:
        """The rate in two digits; where the sweep does not say, on which side of it it lies."""
        rate, reason = self.sustains(key, target)
        if rate is not None:
            return f"{rate:.2f}"
        rates = [float(r["rate"]) for r in self.results]
        bounds = {"still": f"> {rates[-1]:g}", "already": f"< {rates[0]:g}"}
        return bounds.get(reason.split()[0], "-")

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


def crossed(found: Sequence[Sweep], targets: Sequence[Target]) -> list[Target]:
    """Those that some sweep crosses."""
    return [t for t in targets if any(sweep.sustains(*t[1:])[0] is not None for sweep in found)]


def table(results: Sequence[Result]) -> list[str]:
    """Lines for people: sustainable rates at each target, or beyond which measured rate they lie
    (`-`: fewer than two were measured). Tighter targets are there if some sweep crosses them."""
    found = sweeps(results)
    targets = [*TARGETS, *crossed(found, TENTHS)]
    lines = [f"{'machine, workload, policy':58}" + "".join(f"{t[0]:>16}" for t in targets)]
    for sweep in found:
        label = f"{sweep.profile}, {sweep.workload}, {sweep.name}"
        cells = (f"{sweep.said(*target[1:]):>16}" for target in targets)
        lines.append(f"{label:58}" + "".join(cells))
    return lines
