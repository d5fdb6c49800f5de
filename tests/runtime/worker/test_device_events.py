"""How far a thread may queue ahead of its device."""

import itertools

import pytest

from dualpace.runtime.worker.cuda.events import Lately, Lead

TASKS = 32  # of a round


@pytest.mark.parametrize("most", [1, 16])
def test_the_next_task_waits_for_the_one_that_lies_so_far_back(most: int) -> None:
    """Also when that was of the round before; the last tasks of a round wait for none."""
    number = itertools.count()
    lead = Lead(most, 4, lambda: next(number))  # type: ignore[arg-type, return-value]
    for first in (0, TASKS, 2 * TASKS):
        for task in range(TASKS):
            back, left = first + task - most, TASKS - 1 - task
            assert lead.blockers(left) == ([back] if left > 4 and back >= 0 else [])


def test_lately_ends_by_itself() -> None:
    now = 10.0
    lately = Lately(0.25, lambda: now)
    assert not lately
    lately.mark()
    now = 10.2
    assert lately
    lately.mark()
    now = 10.4
    assert lately
    now = 10.5
    assert not lately
