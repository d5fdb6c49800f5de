"""Heads that ranks of two differently divided tiers have in common."""

import numpy as np
import pytest

from dualpace.runtime.kv.overlaps import Overlap, overlaps


def test_equal_divisions_meet_one_to_one() -> None:
    assert overlaps(8, 1, 4, 4) == (Overlap(1, slice(0, 2), slice(0, 2)),)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("other_size", [1, 2, 3, 4, 6, 12])
def test_every_head_is_found_once_where_it_lies(size: int, other_size: int) -> None:
    there = np.arange(12).reshape(other_size, -1)
    for rank, wanted in enumerate(np.arange(12).reshape(size, -1)):
        own = np.full_like(wanted, -1)
        for part in overlaps(12, rank, size, other_size):
            assert (own[part.own] == -1).all()
            own[part.own] = there[part.other, part.theirs]
        assert own.tolist() == wanted.tolist()
