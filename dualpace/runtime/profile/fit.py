"""The three controls from measured numbers (paper 4.3): thresholds by Algorithm 1, the GPU's token
limit, the CPU's batch limit. Arithmetic alone: knows nothing about how anything was measured.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean

from scipy.optimize import isotonic_regression

from dualpace.runtime.routing import Route, route

Scores = Mapping[Route, Sequence[float]]  # ms, one entry a profiled batch size


def fit_thresholds(
    scores: Scores, batch_sizes: Sequence[int], num_layers: int, epsilon: float
) -> tuple[int, int]:
    """(P, F) by Algorithm 1: of the pairs whose mean score is within (1 + epsilon) of the best, the
    one with the fewest assist calls, then the lowest score, P and F.

    `scores[route][i]` is S_r in ms at `batch_sizes[i]`; repeats of a size are averaged first.
    Raises ValueError for input that is empty, mismatched or not finite, sizes or layers below 1,
    and a negative epsilon.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers} is below 1")
    check_share("epsilon", epsilon)
    table = score_table(scores, batch_sizes)
    ranked = threshold_scores(table)
    best = min(ranked.values())
    limit = (1 + epsilon) * best if best > 0 else best
    calls = assist_calls(num_layers)

    def order(pair: tuple[int, int]) -> tuple[float, float, int, int]:
        mean_calls = fmean(calls[route(size, *pair)] for size in table)
        return mean_calls, ranked[pair], *pair

    return min((pair for pair, score in ranked.items() if score <= limit), key=order)


def assist_calls(num_layers: int) -> dict[Route, int]:
    """Dense Assists of one iteration by route (Algorithm 1, lines 2-4)."""
    return {Route.FULL_CPU: 0, Route.SPLIT_FINAL: 1, Route.FUSED_ASSIST: num_layers}


def score_table(scores: Scores, batch_sizes: Sequence[int]) -> dict[int, dict[Route, float]]:
    """Mean score by distinct size (ascending) and route. Raises ValueError as `fit_thresholds`."""
    missing = [name for name in Route if name not in scores]
    if missing:
        raise ValueError(f"scores lack the routes {', '.join(missing)}")
    columns = {name: mean_by_size(batch_sizes, scores[name], name) for name in Route}
    return {size: {name: columns[name][size] for name in Route} for size in columns[Route.FULL_CPU]}


def threshold_scores(table: Mapping[int, Mapping[Route, float]]) -> dict[tuple[int, int], float]:
    """ThresholdScore of every legal pair (Equation 9)."""
    pairs = [(0, 0), *((p, f) for p in table for f in (0, *table) if f < p)]
    return {pair: fmean(table[size][route(size, *pair)] for size in table) for pair in pairs}


def best_routes(table: Mapping[int, Mapping[Route, float]]) -> dict[int, Route]:
    """The route with the lowest score at each size; of equals the one with fewer assists."""
    return {size: min(Route, key=lambda name: row[name]) for size, row in table.items()}


def regret(chosen: float, best: float) -> float:
    """How much worse than the best, as a share of it."""
    return chosen / best - 1 if best > 0 else 0.0


def fit_token_limit(
    num_tokens: Sequence[int],
    throughput: Sequence[float],
    plateau_points: int = 5,
    tolerance: float = 0.01,
) -> int:
    """The smallest profiled size whose smoothed throughput reaches (1 - tolerance) of the plateau.

    The smoothing is a nondecreasing least-squares fit to the mean throughput by size, the plateau
    the mean of its last `plateau_points` values (of all, where there are fewer). Any unit of
    throughput. Raises ValueError for input that is empty, mismatched, negative or not finite.
    """
    if plateau_points < 1:
        raise ValueError(f"plateau_points={plateau_points} is below 1")
    check_share("tolerance", tolerance)
    smooth = smoothed(num_tokens, throughput)
    plateau = plateau_of(list(smooth.values()), plateau_points)
    return next(size for size, value in smooth.items() if value >= (1 - tolerance) * plateau)


def smoothed(num_tokens: Sequence[int], throughput: Sequence[float]) -> dict[int, float]:
    """The isotonic fit by distinct size, ascending; each size weighs the same."""
    means = mean_by_size(num_tokens, throughput, "throughput")
    if min(means.values()) < 0:
        raise ValueError("throughput holds a value below 0")
    fitted = isotonic_regression(list(means.values()), increasing=True).x
    return dict(zip(means, fitted.tolist(), strict=True))


def plateau_of(fitted: Sequence[float], plateau_points: int) -> float:
    """Mean of the last values; rounding must not lift it above all of them."""
    return min(fmean(fitted[-plateau_points:]), fitted[-1])


def fit_cpu_batch_limit(
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    throughput: Sequence[float],
    tolerance: float = 0.01,
) -> int:
    """The smallest batch whose decode throughput is within `tolerance` of the peak.

    Sample i has `batch_sizes[i]` rows of `contexts[i]` KV tokens. Each context counts alike: its
    throughputs are taken as shares of its own peak, then averaged by batch. Raises ValueError as
    `fit_token_limit`.
    """
    check_share("tolerance", tolerance)
    shares = batch_shares(batch_sizes, contexts, throughput)
    limit = (1 - tolerance) * max(shares.values())
    return next(size for size, share in shares.items() if share >= limit)


def batch_shares(
    batch_sizes: Sequence[int], contexts: Sequence[int], throughput: Sequence[float]
) -> dict[int, float]:
    """Mean share of each context's peak by batch size, ascending."""
    check_sizes(batch_sizes, throughput, "throughput")
    check_sizes(contexts, throughput, "throughput")
    if min(throughput) < 0:
        raise ValueError("throughput holds a value below 0")
    samples = sorted(zip(contexts, batch_sizes, throughput, strict=True))
    shares = defaultdict(list)
    for _, group in groupby(samples, key=lambda sample: sample[0]):
        members = list(group)
        means = mean_by_size([m[1] for m in members], [m[2] for m in members], "throughput")
        peak = max(means.values()) or 1.0
        for size, value in means.items():
            shares[size].append(value / peak)
    return {size: fmean(shares[size]) for size in sorted(shares)}


def mean_by_size(sizes: Sequence[int], values: Sequence[float], what: str) -> dict[int, float]:
    """Repeats averaged, by distinct size, ascending."""
    check_sizes(sizes, values, what)
    found: dict[int, list[float]] = defaultdict(list)
    for size, value in zip(sizes, values, strict=True):
        found[int(size)].append(float(value))
    return {size: fmean(found[size]) for size in sorted(found)}


def check_sizes(sizes: Sequence[int], values: Sequence[float], what: str) -> None:
    """Raises ValueError for what no fit can use."""
    if len(sizes) == 0:
        raise ValueError("there are no sizes to fit")
    if len(sizes) != len(values):
        raise ValueError(f"there are {len(sizes)} sizes and {len(values)} values of {what}")
    if not all_finite(sizes) or not all_finite(values):
        raise ValueError(f"a size or a value of {what} is not a finite number")
    if any(size < 1 or size != int(size) for size in sizes):
        raise ValueError("sizes are whole numbers from 1 up")


def check_share(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value} is not a number from 0 up")


def all_finite(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in values)
