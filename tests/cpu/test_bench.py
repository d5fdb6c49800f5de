"""The benchmark's own arithmetic: what an iteration must cost at least, and that it runs whole."""

import math

from dualpace.cpu import bench_iteration as bench


def test_roofline_counts_each_weight_and_token_once() -> None:
    model = bench.Model(layers=2)
    ideal = bench._roofline(model, rows=4, context=100, bandwidth=1e9, rate=None)
    weights = 4096 * (4096 + 3 * 14336) * 2
    assert math.isclose(ideal["post"], 2 * weights / 1e9)
    assert math.isclose(ideal["attention"], 2 * 4 * 100 * 2 * 8 * 128 * 2 / 1e9)
    assert math.isclose(ideal["final"], 2 * 4096 * 128256 / 1e9)
    # Many rows are limited by arithmetic: two operations a weight and row.
    many = bench._roofline(model, rows=4096, context=1, bandwidth=1e15, rate=1e12)
    assert math.isclose(many["post"], 2 * 4096 * weights / 1e12)


def test_iteration_is_split_by_stage() -> None:
    model = bench.Model(96, 160, 6, 2, 64, 320, layers=3, sets=2)
    (record,) = bench.iteration_table(model, (5,), 40, 1e10, None)
    assert set(record["stages_ms"]) == set(bench.STAGES)
    assert all(t > 0 for t in record["stages_ms"].values())
    assert sum(record["stages_ms"].values()) <= record["ms"] + 0.1
