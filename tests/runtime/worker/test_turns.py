"""How many stage tasks a turn of the GPU worker runs: one where an assist may come between them."""

from typing import Any

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
        return []

    def take_ended(self) -> list[int]:
        return []


def turned(played: Played, times: int) -> list[str]:
    parts: Any = played
    worker = AcceleratorWorker(parts, parts, parts, parts)
    for _ in range(times):
        worker.turn()
    return played.ran


def test_assists_are_looked_for_before_each_task_while_they_are_expected() -> None:
    assert turned(Played(are_expected=True), TASKS) == ["look", "task"] * TASKS


def test_a_round_runs_whole_while_none_is_expected() -> None:
    assert turned(Played(are_expected=False), 2) == ["look", *["task"] * TASKS, "look"]
