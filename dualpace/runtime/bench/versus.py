"""One policy against another at the same rates: changes in percent, and in words where the first
one helps and where it does not. Knows only the keys of results."""

from collections.abc import Sequence
from dataclasses import dataclass

from dualpace.runtime.bench.sustain import Result, Sweep

SAME = 0.02  # two runs of one policy differ by as much


@dataclass(frozen=True, slots=True)
class Measure:
    """A key of results that is compared; more of it is better, or less."""

    key: str
    name: str
    more: bool = False


MEASURES = (
    Measure("mean_normalized_latency_s_per_token", "s/token"),
    Measure("mean_e2el_ms", "mean time to the last token"),
    Measure("p99_ttft_ms", "P99 TTFT"),
    Measure("p99_itl_ms", "P99 ITL"),
    Measure("p99_tpot_ms", "P99 TPOT"),
    Measure("request_throughput", "requests completed/s", more=True),
    Measure("output_throughput", "output tokens/s", more=True),
)


def pairs(ours: Sweep, other: Sweep) -> list[tuple[Result, Result]]:
    """Points of both sweeps at the same rates, by rate."""
    theirs = {r["rate"]: r for r in other.results}
    return [(r, theirs[r["rate"]]) for r in ours.results if r["rate"] in theirs]


def change(measure: Measure, ours: Result, other: Result) -> float | None:
    """As a share of the other's; None where there is nothing to divide by, or a key is missing."""
    a, b = ours.get(measure.key), other.get(measure.key)
    return a / b - 1 if a is not None and b else None


def rows(ours: Sweep, other: Sweep) -> list[tuple[str, ...]]:
    """A row a rate: the rate, the changes, the share of our tokens that the host made."""
    found = []
    for mine, theirs in pairs(ours, other):
        changes = (change(measure, mine, theirs) for measure in MEASURES)
        cells = ("-" if c is None else f"{100 * c:+.1f} %" for c in changes)
        found.append((f"{mine['rate']:g}", *cells, f"{100 * on_host(mine):.1f} %"))
    return found


def on_host(result: Result) -> float:
    return float(result["cpu_resident_tokens"] / max(result["total_output_tokens"], 1))


def statement(ours: Sweep, other: Sweep) -> list[str]:
    """A sentence a measure that says at which rates ours is worse, better or the same, and one
    about rates at which the host made no token."""
    points = pairs(ours, other)
    sentences = [line for measure in MEASURES if (line := verdict(measure, points))]
    idle = [f"{mine['rate']:g}" for mine, _ in points if mine["cpu_resident_tokens"] == 0]
    if idle:
        sentences.append(f"The host made no token at {listed(idle)} requests/s.")
    return sentences


def verdict(measure: Measure, points: Sequence[tuple[Result, Result]]) -> str:
    """Empty where no point can be compared."""
    sides: dict[str, list[str]] = {"**worse**": [], "better": [], "the same": []}
    for mine, theirs in points:
        changed = change(measure, mine, theirs)
        if changed is None:
            continue
        rate = f"{mine['rate']:g}"
        if abs(changed) <= SAME:
            sides["the same"].append(rate)
        else:
            side = "better" if (changed > 0) == measure.more else "**worse**"
            sides[side].append(f"{rate} ({100 * changed:+.1f} %)")
    said = [f"{side} at {listed(rates)}" for side, rates in sides.items() if rates]
    return f"{measure.name}: {'; '.join(said)} requests/s." if said else ""


def listed(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
