"""How many stage tasks a turn of the GPU worker runs, one where an assist may come between them,
and when it tells of rounds."""

from typing import Any

import pytest

from dualpace.runtime.messages import GpuBatch
from dualpace.runtime.worker.accelerator import AcceleratorWorker

TASKS = 5


class Played:
    """Link, rounds, transfers and assists at once: notes what is run."""

    must_poll = False
    checks = None
    rank = 0

    def __init__(self, are_expected: bool) -> None:
        self.are_expected = are_expected
        self.ran: list[str] = []
        self.batches = [object.__new__(GpuBatch)]

    def wait(self, block: bool) -> None: ...

    def receive(self) -> list[GpuBatch]:
        batches, self.batches = self.batches, []
        return batches

    def serve(self) -> bool:
        self.ran.append("look")
        return False

    def tasks(self, batch: GpuBatch) -> Any:
        for _ in range(TASKS):
            self.ran.append("task")
            yield []

    def take_finished(self) -> list[Any]:
        """The round before ends while the third task of this one is queued."""
        return ["round"] if self.ran.count("task") == 3 and "told round" not in self.ran else []

    def send(self, message: str) -> None:
        self.ran.append(f"told {message}")

    def take_ended(self) -> list[int]:
        return []


def turned(played: Played, times: int) -> list[str]:
    parts: Any = played
    worker = AcceleratorWorker(parts, parts, parts, parts)
    for _ in range(times):
        worker.turn()
    return played.ran


def test_assists_are_looked_for_before_each_task_while_they_are_expected() -> None:
    ran = turned(Played(are_expected=True), TASKS)
    assert [what for what in ran if what != "told round"] == ["look", "task"] * TASKS


def test_a_round_runs_whole_while_none_is_expected() -> None:
    ran = turned(Played(are_expected=False), 2)
    assert [what for what in ran if what != "told round"] == ["look", *["task"] * TASKS, "look"]


@pytest.mark.parametrize("are_expected", [False, True])
def test_a_round_is_told_while_the_next_one_is_queued(are_expected: bool) -> None:
    ran = turned(Played(are_expected), TASKS)
    assert ran[: ran.index("told round")].count("task") == 3
