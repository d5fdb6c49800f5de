"""Equation 5."""

import pytest

from dualpace.runtime.routing import Route, route


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, Route.FULL_CPU),
        (8, Route.FULL_CPU),
        (9, Route.SPLIT_FINAL),
        (32, Route.SPLIT_FINAL),
        (33, Route.FUSED_ASSIST),
    ],
)
def test_thresholds_are_the_largest_local_batches(size: int, expected: Route) -> None:
    assert route(size, post_attention_limit=32, post_layer_limit=8) is expected


def test_zero_thresholds_assist_every_batch() -> None:
    assert route(1, 0, 0) is Route.FUSED_ASSIST


def test_without_a_local_post_layer_nothing_is_full_cpu() -> None:
    assert [route(b, 2, 0) for b in (1, 2, 3)] == [
        Route.SPLIT_FINAL,
        Route.SPLIT_FINAL,
        Route.FUSED_ASSIST,
    ]


@pytest.mark.parametrize(("p", "f"), [(4, 4), (4, 5), (0, 1), (-1, 0), (3, -1), (-1, -1)])
def test_other_thresholds_are_illegal(p: int, f: int) -> None:
    with pytest.raises(ValueError, match="illegal"):
        route(1, p, f)


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_batch_has_no_route(size: int) -> None:
    with pytest.raises(ValueError, match="no route"):
        route(size, 4, 2)
