"""What turns of one rank and of several amount to, and how the cores are shared."""

import pytest

from dualpace.cpu.topology import shares
from dualpace.runtime.profile.contest import Turn, main, summary


def test_the_slowest_rank_counts_and_sums_are_a_share_of_its_time() -> None:
    turns = {
        1: [Turn([0.030], [0.0]), Turn([0.020], [0.0]), Turn([0.090], [0.0])],
        2: [Turn([0.010, 0.020], [0.006, 0.002]), Turn([0.020, 0.010], [0.002, 0.006])],
    }
    found = summary(turns)
    assert found["ms"] == {"1": 30.0, "2": 20.0} and found["gain"] == 1.5
    assert found["best_ms"] == {"1": 20.0, "2": 20.0}
    assert found["sums_share"] == pytest.approx(0.2)
    assert found["sums_least_share"] == pytest.approx(0.1)


def test_all_cores_are_shared_and_no_rank_crosses_a_node() -> None:
    node_of = {core: core % 2 for core in range(8)}
    assert shares(range(8), node_of, 1) == (tuple(range(8)),)
    assert shares(range(8), node_of, 2) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert shares(range(8), {}, 2) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_one_rank_alone_is_no_contest() -> None:
    refusal = r"^cpu\.tp=1 leaves nothing to compare: set cpu\.tp=2\.$"
    with pytest.raises(SystemExit, match=refusal):
        main(["model=tiny_random"])
