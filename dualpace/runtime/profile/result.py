"""From measured points to choices: the fits, and all that figures, report and profile say of them.

Plain data in, plain data out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dualpace.errors import ConfigError
from dualpace.runtime.assist import AssistKind
from dualpace.runtime.profile.config import SweepConfig
from dualpace.runtime.profile.fit import (
    batch_shares,
    best_routes,
    fit_cpu_batch_limit,
    fit_thresholds,
    fit_token_limit,
    mean_by_size,
    plateau_of,
    regret,
    score_table,
    smoothed,
    threshold_scores,
)
from dualpace.runtime.routing import Route, route
from dualpace.runtime.scores import (
    AssistCall,
    Calibration,
    Primitives,
    calibrate,
    route_scores,
)

Result = Mapping[str, Any]  # one point's file
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Routing:
    """The thresholds, and what else was there to choose. Scores in ms."""

    primitives: dict[int, Primitives]  # by batch size
    calibration: Calibration
    table: dict[int, dict[Route, float]]  # S_r(b)
    chosen: Pair
    pair_scores: dict[Pair, float]  # Equation 9
    best_routes: dict[int, Route]
    formable: list[int]  # sizes that the CPU batch limit allows

    @property
    def best_pair(self) -> Pair:
        return min(self.pair_scores, key=lambda pair: self.pair_scores[pair])

    @property
    def table_score(self) -> float:
        """Mean score when each size runs its own best route."""
        return fmean(self.table[size][name] for size, name in self.best_routes.items())

    def regret_of(self, pair: Pair) -> float:
        """How much worse than the full table a pair of thresholds is, as a share, over the batches
        that can be formed: sizes above the CPU batch limit count in Algorithm 1 alone."""
        sizes = self.formable
        chosen = fmean(self.table[size][route(size, *pair)] for size in sizes)
        best = fmean(self.table[size][self.best_routes[size]] for size in sizes)
        return regret(chosen, best)


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Throughput in tokens/s of one layer by total tokens."""

    shapes: list[tuple[int, int, float]]  # prompts, length, throughput
    means: dict[int, float]
    smooth: dict[int, float]
    plateau: float
    limit: int


@dataclass(frozen=True, slots=True)
class CpuBatch:
    """Decode throughput in tokens/s of one layer."""

    grid: list[tuple[int, int, float]]  # rows, context, throughput
    shares: dict[int, float]  # of each context's peak, mean by rows
    limit: int


@dataclass(frozen=True, slots=True)
class Choices:
    """All that a sweep decided."""

    num_layers: int
    routing: Routing
    tokens: TokenLimit
    cpu: CpuBatch

    def settings(self) -> dict[str, int]:
        p, f = self.routing.chosen
        return {
            "post_attention_limit": p,
            "post_layer_limit": f,
            "token_limit": self.tokens.limit,
            "cpu_batch_limit": self.cpu.limit,
        }


def choose(results: Sequence[Result], sweep: SweepConfig, num_layers: int) -> Choices:
    """Fits all three controls. ConfigError where the numbers allow none."""
    try:
        cpu = _cpu_batch(of_kind(results, "decode"), sweep)
        return Choices(
            num_layers,
            _routing(of_kind(results, "route"), sweep, num_layers, cpu.limit),
            _tokens(of_kind(results, "prefill"), sweep),
            cpu,
        )
    except ValueError as error:
        raise ConfigError(f"the measured points cannot be fitted: {error}.") from error


def of_kind(results: Sequence[Result], kind: str) -> dict[int, Any]:
    """Values by batch size, ascending."""
    found = {r["point"]["batch"]: r["values"] for r in results if r["point"]["kind"] == kind}
    return dict(sorted(found.items()))


def _routing(
    values: Mapping[int, Any], sweep: SweepConfig, num_layers: int, cpu_limit: int
) -> Routing:
    rows = {size: primitives(value) for size, value in values.items()}
    calibration = calibrate(call for value in values.values() for call in calls(value))
    scores = route_scores(list(rows.values()), calibration, num_layers, sweep.gpu_weight)
    sizes = list(rows)
    table = score_table(scores, sizes)
    return Routing(
        primitives=rows,
        calibration=calibration,
        table=table,
        chosen=fit_thresholds(scores, sizes, num_layers, sweep.epsilon),
        pair_scores=threshold_scores(table),
        best_routes=best_routes(table),
        formable=[size for size in table if size <= cpu_limit] or list(table),
    )


def primitives(values: Mapping[str, Any]) -> Primitives:
    """Equation 11 from a route point."""
    ms = {name: taken["ms"] for name, taken in values["samples"].items()}
    return Primitives(
        post_attention=ms["post_attention"],
        post_layer=ms["post_layer"],
        write=ms["write"],
        read=ms["read"],
        write_final=ms["write_final"],
        assist={kind: values["assists"][kind.name]["ms"] for kind in AssistKind},
    )


def calls(values: Mapping[str, Any]) -> list[AssistCall]:
    return [AssistCall(**{**c, "kind": AssistKind(c["kind"])}) for c in values["calls"]]


def _tokens(values: Mapping[int, Any], sweep: SweepConfig) -> TokenLimit:
    shapes = [
        (batch, shape["length"], shape["throughput"])
        for batch, value in values.items()
        for shape in value["lengths"]
    ]
    sizes = [batch * length for batch, length, _ in shapes]
    rates = [rate for *_, rate in shapes]
    smooth = smoothed(sizes, rates)
    return TokenLimit(
        shapes=shapes,
        means=mean_by_size(sizes, rates, "throughput"),
        smooth=smooth,
        plateau=plateau_of(list(smooth.values()), sweep.plateau_points),
        limit=fit_token_limit(sizes, rates, sweep.plateau_points, sweep.tolerance),
    )


def _cpu_batch(values: Mapping[int, Any], sweep: SweepConfig) -> CpuBatch:
    grid = [
        (batch, point["context"], point["throughput"])
        for batch, value in values.items()
        for point in value["contexts"]
    ]
    batches, contexts, rates = (list(column) for column in zip(*grid, strict=True))
    return CpuBatch(
        grid=grid,
        shares=batch_shares(batches, contexts, rates),
        limit=fit_cpu_batch_limit(batches, contexts, rates, sweep.tolerance),
    )
