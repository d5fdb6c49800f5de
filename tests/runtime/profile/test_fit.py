"""The fits against brute force written from the paper alone, and degenerate input."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpace.runtime.profile.fit import (
    assist_calls,
    best_routes,
    fit_cpu_batch_limit,
    fit_thresholds,
    fit_token_limit,
    score_table,
    smoothed,
    threshold_scores,
)
from dualpace.runtime.routing import Route

FULL, SPLIT, FUSED = Route.FULL_CPU, Route.SPLIT_FINAL, Route.FUSED_ASSIST


def brute_force_thresholds(scores, sizes, layers, epsilon):
    """Algorithm 1 line by line, over sizes that are all distinct."""
    calls = {FULL: 0, SPLIT: 1, FUSED: layers}

    def policy(p, f, b):
        return FULL if b <= f else SPLIT if b <= p else FUSED

    theta = [(0, 0)] + [(p, f) for p in sizes for f in [0, *sizes] if f < p]
    score, average = {}, {}
    for p, f in theta:
        score[p, f] = sum(scores[policy(p, f, b)][i] for i, b in enumerate(sizes)) / len(sizes)
        average[p, f] = sum(calls[policy(p, f, b)] for b in sizes) / len(sizes)
    best = min(score.values())
    near = [pair for pair in theta if score[pair] <= (1 + epsilon) * best]
    return sorted(near, key=lambda pair: (average[pair], score[pair], pair[0], pair[1]))[0]


def brute_force_isotonic(values):
    """Min-max formula of the nondecreasing least-squares fit."""
    n = len(values)

    def mean(i, j):
        return sum(values[i : j + 1]) / (j - i + 1)

    return [max(min(mean(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)]


sizes_lists = st.lists(st.integers(1, 600), min_size=1, max_size=7, unique=True)


@given(data=st.data(), sizes=sizes_lists, layers=st.integers(1, 64))
def test_thresholds_equal_a_brute_force(data, sizes, layers):
    row = st.lists(st.integers(1, 40), min_size=len(sizes), max_size=len(sizes))
    scores = {name: data.draw(row) for name in Route}
    epsilon = data.draw(st.sampled_from([0.0, 0.0025, 0.0625, 0.5]))
    expected = brute_force_thresholds(scores, sizes, layers, epsilon)
    assert fit_thresholds(scores, sizes, layers, epsilon) == expected


@given(data=st.data(), sizes=sizes_lists)
def test_repeats_count_as_their_mean(data, sizes):
    one = st.lists(st.integers(1, 40), min_size=len(sizes), max_size=len(sizes))
    first = {name: data.draw(one) for name in Route}
    shift = {name: data.draw(st.integers(-1, 1)) * 0.5 for name in Route}
    repeated = {
        name: [v - shift[name] for v in row] + [v + shift[name] for v in row]
        for name, row in first.items()
    }
    assert fit_thresholds(repeated, sizes * 2, 4, 0.01) == fit_thresholds(first, sizes, 4, 0.01)


def test_near_ties_go_to_fewer_assists_and_exact_ones_to_the_lower_score():
    scores = {FULL: [100.0], SPLIT: [100.1], FUSED: [99.9]}
    assert fit_thresholds(scores, [8], 32, 0.0) == (0, 0)
    assert fit_thresholds(scores, [8], 32, 0.0025) == (8, 0)  # F = 8 needs a size above it
    scores = {name: [*row, row[0]] for name, row in scores.items()}
    assert fit_thresholds(scores, [8, 16], 32, 0.0025) == (16, 8)


def test_epsilon_is_a_share_of_the_best_score_however_small() -> None:
    scores = {FULL: [0.5], SPLIT: [0.52], FUSED: [0.5]}
    assert fit_thresholds(scores, [8], 32, 0.05) == (8, 0)
    assert fit_thresholds(scores, [8], 32, 0.03) == (0, 0)


def test_an_iteration_has_no_assist_one_or_one_a_layer() -> None:
    assert assist_calls(32) == {FULL: 0, SPLIT: 1, FUSED: 32}


def test_full_cpu_for_all_batches_comes_out_where_a_size_above_the_limit_was_profiled():
    sizes = [1, 64, 256, 320]
    scores = {FULL: [1, 2, 3, 4], SPLIT: [2, 4, 6, 8], FUSED: [9, 9, 9, 9]}
    assert fit_thresholds(scores, sizes, 32, 0.0025) == (320, 256)


@given(
    points=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 50)), min_size=1, max_size=12),
    plateau=st.integers(1, 8),
    tolerance=st.sampled_from([0.0, 0.0625, 0.25]),
)
def test_token_limit_equals_a_brute_force(points, plateau, tolerance):
    by_size = {size: [v for s, v in points if s == size] for size in sorted({s for s, _ in points})}
    fitted = brute_force_isotonic([sum(v) / len(v) for v in by_size.values()])
    last = fitted[-plateau:]
    target = (1 - tolerance) * sum(last) / len(last)
    reached = [size for size, value in zip(by_size, fitted, strict=True) if value > target - 1e-9]
    assert fit_token_limit(*zip(*points, strict=True), plateau, tolerance) == reached[0]


@pytest.mark.parametrize(
    ("sizes", "values", "options", "limit"),
    [
        ([64], [7.0], {}, 64),  # one point is its own plateau
        ([1, 2], [1.0, 9.0], {}, 2),  # fewer points than K: the mean of all is the plateau
        ([1, 2, 4], [8.0, 5.0, 5.0], {}, 1),  # falling: the fit is flat
        ([4, 1, 4, 2], [10.0, 1.0, 12.0, 11.0], {"plateau_points": 1}, 2),
        ([1, 2], [0.0, 0.0], {}, 1),
        ([3, 5, 9], [0.1, 0.1, 0.1], {"tolerance": 0.0}, 3),  # rounding finds an answer too
    ],
)
def test_token_limit_of_few_points(sizes, values, options, limit):
    assert fit_token_limit(sizes, values, **options) == limit


BAD_PAIRS = [
    ([], []),
    ([1], []),
    ([1, 2], [1.0]),
    ([0], [1.0]),
    ([-4], [1.0]),
    ([1.5], [1.0]),
    ([1], [math.nan]),
    ([1, 2], [1.0, math.inf]),
    ([math.nan], [1.0]),
]


@pytest.mark.parametrize(("sizes", "values"), BAD_PAIRS)
def test_input_that_says_nothing_is_refused(sizes, values):
    with pytest.raises(ValueError):
        fit_token_limit(sizes, values)
    with pytest.raises(ValueError):
        fit_cpu_batch_limit(sizes, [1] * len(sizes), values)
    for bad in Route:
        rows = {name: values if name is bad else [1.0] * len(sizes) for name in Route}
        with pytest.raises(ValueError):
            fit_thresholds(rows, sizes, 4, 0.0)


@pytest.mark.parametrize(
    ("layers", "epsilon"), [(0, 0.0), (-1, 0.0), (1, -0.1), (1, math.nan), (1, math.inf)]
)
def test_impossible_parameters_are_refused(layers, epsilon):
    with pytest.raises(ValueError):
        fit_thresholds({name: [1.0] for name in Route}, [1], layers, epsilon)
    with pytest.raises(ValueError):
        fit_token_limit([1], [1.0], plateau_points=0)
    with pytest.raises(ValueError):
        fit_token_limit([1], [1.0], tolerance=-0.1)


def test_a_missing_route_is_refused():
    with pytest.raises(ValueError, match="fused_assist"):
        fit_thresholds({FULL: [1.0], SPLIT: [1.0]}, [1], 4, 0.0)


def test_cpu_batch_limit_is_the_peak_and_contexts_count_alike():
    sizes, contexts = [16, 64, 256], [64, 512]
    grid = list(itertools.product(sizes, contexts))
    speed = {16: 0.5, 64: 1.0, 256: 0.9}
    throughput = [speed[b] * (1000 if c == 64 else 10) for b, c in grid]
    assert fit_cpu_batch_limit([b for b, _ in grid], [c for _, c in grid], throughput) == 64
    level = [1.0 if b > 16 else 0.5 for b, _ in grid]
    assert fit_cpu_batch_limit([b for b, _ in grid], [c for _, c in grid], level) == 64


def test_best_routes_beat_or_meet_every_threshold_pair():
    scores = {FULL: [1, 5, 3], SPLIT: [2, 4, 9], FUSED: [3, 6, 8]}
    table = score_table(scores, [1, 2, 4])
    assert best_routes(table) == {1: FULL, 2: SPLIT, 4: FULL}
    ideal = sum(table[b][r] for b, r in best_routes(table).items()) / 3
    assert ideal < min(threshold_scores(table).values())


def test_the_smoothed_curve_never_falls():
    assert list(smoothed([1, 2, 3], [3.0, 1.0, 5.0]).values()) == [2.0, 2.0, 5.0]
