"""What served pairs of thresholds gave: means over runs, how far two runs of one pair lie apart,
and whether pairs chose alike. Knows nothing of how they were served."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from dualpace.runtime.routing import ROUTES

Pair = tuple[int, int]  # P and F

WITHIN = 0.03  # of the best, where the fitted pair should be
ALIKE = 0.9  # of host batches by the same route: what differs then is mostly chance


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a pair gave; rates are of both engines within the window."""

    turn: int
    output_tokens_per_s: float
    requests_per_s: float
    cpu_iteration_ms: float
    host_share: float  # of all tokens
    p99_itl_ms: float
    routes: Mapping[str, int]  # host batches by route

    @classmethod
    def of(cls, turn: int, found: Mapping[str, Any]) -> "Run":
        """`found` is the benchmark's result."""
        stats = found["stats"]
        tokens, routes = stats["tokens"], stats.get("routes", {})
        return cls(
            turn=turn,
            output_tokens_per_s=found["window_output_tokens_per_s"],
            requests_per_s=found["window_requests_per_s"],
            cpu_iteration_ms=found.get("cpu_iteration_ms_median", 0.0),
            host_share=tokens["cpu"] / max(sum(tokens.values()), 1),
            p99_itl_ms=found["p99_itl_ms"],
            routes={route.value: routes.get(route.name, 0) for route in ROUTES},
        )

    def __str__(self) -> str:
        return (
            f"{self.output_tokens_per_s:,.0f} output tokens/s, {self.requests_per_s:.2f} "
            f"requests/s, {100 * self.host_share:.1f} % on the host in iterations of "
            f"{self.cpu_iteration_ms:.0f} ms, P99 ITL {self.p99_itl_ms:.0f} ms"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """All runs of a pair, of which there is at least one."""

    pair: Pair
    score_ms: float | None  # Equation 9, where a profile says it
    runs: tuple[Run, ...]

    @property
    def tokens_per_s(self) -> float:
        return fmean(run.output_tokens_per_s for run in self.runs)

    @property
    def spread(self) -> float | None:
        """The largest distance between two runs, as a share of the mean; None of a single one."""
        rates = [run.output_tokens_per_s for run in self.runs]
        return None if len(rates) < 2 else (max(rates) - min(rates)) / max(self.tokens_per_s, 1e-9)

    @property
    def routes(self) -> dict[str, int]:
        """Host batches of all runs by route."""
        return {route.value: sum(run.routes[route.value] for run in self.runs) for route in ROUTES}


def alike(one: Row, other: Row) -> float | None:
    """Share of host batches for which both pairs chose the same route, as far as counts tell; None
    where either had no host batch."""
    mine, theirs = (list(row.routes.values()) for row in (one, other))
    if not sum(mine) or not sum(theirs):
        return None
    both = zip(mine, theirs, strict=True)
    return sum(min(a / sum(mine), b / sum(theirs)) for a, b in both)


def table(rows: Sequence[Row], fitted: Pair | None) -> list[str]:
    """Markdown: from the best throughput down, with the score's rank and host batches by route."""
    ranks = score_ranks(rows)
    lines = [
        "| P, F | output tokens/s | of the best | spread | full / split / fused | score, ms "
        "| score's rank |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    ordered = by_rate(rows)
    for row in ordered:
        cells = (
            name(row.pair, fitted),
            f"{row.tokens_per_s:,.0f}",
            f"{100 * row.tokens_per_s / max(ordered[0].tokens_per_s, 1e-9):.1f} %",
            "" if row.spread is None else f"{100 * row.spread:.1f} %",
            " / ".join(map(str, row.routes.values())),
            "" if row.score_ms is None else f"{row.score_ms:.1f}",
            str(ranks.get(row.pair, "")),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(rows: Sequence[Row], fitted: Pair | None) -> dict[str, Any]:
    """How close the fitted pair comes to the best, and how close a pair comes to itself."""
    best = by_rate(rows)[0] if rows else None
    mine = next((row for row in rows if row.pair == fitted), None)
    share = mine.tokens_per_s / max(best.tokens_per_s, 1e-9) if mine and best else None
    spreads = [row.spread for row in rows if row.spread is not None]
    noise = max(spreads, default=None)
    return {
        "fitted": fitted,
        "fitted_of_best": share,
        "noise": noise,
        "within": None if share is None else share >= 1 - max(WITHIN, noise or 0.0),
        "alike_best": alike(mine, best) if mine and best else None,
        "rows": [
            {**asdict(row), "tokens_per_s": row.tokens_per_s, "spread": row.spread} for row in rows
        ],
    }


def closing(rows: Sequence[Row], fitted: Pair | None) -> list[str]:
    """The verdict in sentences."""
    if not rows:
        return ["No pair was served."]
    found, best, lines = verdict(rows, fitted), by_rate(rows)[0], []
    if found["fitted_of_best"] is not None:
        behind = 1 - found["fitted_of_best"]
        lines.append(
            "The fitted pair is the best."
            if best.pair == fitted
            else f"The fitted pair is {100 * behind:.1f} % below the best, ({name(best.pair)})."
        )
    lines.append(
        "No pair was served twice, so how far two runs of one lie apart is not known: turns=2."
        if found["noise"] is None
        else f"Two runs of one pair lie up to {100 * found['noise']:.1f} % apart."
    )
    lines += [
        f"({') and ('.join(map(name, group))}) chose the same route for nearly all host batches."
        for group in chose_alike(rows)
    ]
    return lines


def chose_alike(rows: Sequence[Row]) -> list[list[Pair]]:
    """Groups of pairs of which each shares at least `ALIKE` of its host batches with the first."""
    groups: list[list[Row]] = []
    for row in rows:
        home = next((g for g in groups if (alike(g[0], row) or 0.0) >= ALIKE), None)
        if home is None:
            groups.append([row])
        else:
            home.append(row)
    return [[row.pair for row in group] for group in groups if len(group) > 1]


def name(pair: Pair, fitted: Pair | None = None) -> str:
    return f"{pair[0]}, {pair[1]}{' (fitted)' if pair == fitted else ''}"


def score_ranks(rows: Sequence[Row]) -> dict[Pair, int]:
    """1 is the least; equal scores share a rank."""
    scores = {row.pair: row.score_ms for row in rows if row.score_ms is not None}
    return {pair: 1 + sum(s < mine for s in scores.values()) for pair, mine in scores.items()}


def by_rate(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row.tokens_per_s)
