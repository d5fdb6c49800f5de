"""Buckets cover every batch, cheaply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpace.graphs.buckets import FEW, covers, interpolated, rule_of_thumb, stage_buckets


@given(st.dictionaries(st.integers(1, 60), st.floats(0.1, 100), min_size=1))
def test_covers_hold_the_rows_at_the_least_cost(costs: dict[int, float]) -> None:
    found = covers(costs)
    assert len(found) == max(costs) + 1
    assert found[0] == ()
    totals = [sum(costs[bucket] for bucket in cover) for cover in found]
    for rows, cover in enumerate(found):
        assert sum(cover) >= rows
        assert list(cover) == sorted(cover, reverse=True)
        # No bucket in front of another cover is cheaper.
        for bucket, cost in costs.items():
            assert rows == 0 or totals[rows] <= cost + totals[max(rows - bucket, 0)] + 1e-9


def test_a_batch_is_not_padded_to_the_next_bucket() -> None:
    found = covers(rule_of_thumb(FEW))
    assert found[37] == (64,)
    assert found[65] == (64, 1)
    assert found[130] == (64, 64, 4)
    assert max(sum(cover) - rows for rows, cover in enumerate(found)) < 64


def test_a_batch_runs_as_it_is_where_that_is_cheaper_than_padding_or_pieces() -> None:
    costs = rule_of_thumb(FEW)
    found = covers(costs, {bucket: 1.1 * cost for bucket, cost in costs.items()})
    assert found[37] == (37,)  # for 58, where 64 padded take 80
    assert found[64] == (64,)
    assert found[130] == (130,)
    assert found[250] == (256,)
    assert all(len(cover) <= 2 for cover in found)


def test_costs_between_buckets_are_interpolated() -> None:
    assert interpolated({2: 4.0, 4: 8.0}, 4) == [4.0, 4.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize(
    ("largest", "cores", "expected"),
    [
        (256, 2, (1, 4, 16, 64, 256)),
        (8192, 2, (1, 4, 16, 64, 256, 512)),
        (8192, 16, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
        (16, 2, (1, 4, 16)),
        (20, 2, (1, 4, 16, 20)),
        (1, 2, (1,)),
    ],
)
def test_default_buckets_end_with_the_limit(
    largest: int, cores: int, expected: tuple[int, ...]
) -> None:
    assert stage_buckets(largest, 1, cores)["post_attention"] == expected


def test_sampled_rows_have_buckets_of_their_own() -> None:
    sizes = stage_buckets(8192, 100, 2)
    assert sizes["logits"] == sizes["post_layer_greedy"] == (1, 4, 16, 64, 100)
    assert sizes["pre_attention"] == sizes["post_attention"] == (1, 4, 16, 64, 256, 512)


def test_given_buckets_are_cut_to_what_can_be_reached() -> None:
    assert stage_buckets(20, 8, 2, [64, 4, 16])["post_attention"] == (4, 16, 20)
    assert stage_buckets(8192, 8, 2, [64, 4, 16])["post_attention"] == (4, 16, 64)
