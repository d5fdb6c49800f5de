"""What the first rank of an accelerator group decides at stage boundaries: a ring in shared memory
that the others follow.

Which main task or assist comes next depends on when a CPU batch asked for it, which ranks see at
different moments; but all ranks have to run the same stages in the same order, since they add up
parts. So one decides. Knows no torch, and not what a task or an assist is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dualpace.runtime.channel import ring

_SLOTS = 1024  # decisions that the others may be behind
_FIELDS = 5
_WORDS_A_LINE = 8
_PAUSE_S = 50e-6

TASK = -1  # in the place of an assist's kind


@dataclass(frozen=True, slots=True)
class Decision:
    """Run the next main task (`kind` TASK), or one assist."""

    kind: int
    layer: int = 0
    rows: int = 0
    all_greedy: bool = True
    needs_logits: bool = False  # which are edited, or whose log-probabilities are asked for

    @property
    def is_task(self) -> bool:
        return self.kind == TASK


class Order:
    """The ring, one writer and `size - 1` readers. x86 keeps stores in order, so a decision is
    complete when its count is visible.
    """

    def __init__(self, memory: memoryview, size: int) -> None:
        words = np.frombuffer(memory, np.int64)
        lines = words[: size * _WORDS_A_LINE].reshape(size, _WORDS_A_LINE)
        self.counts = lines[:, 0]  # decisions made by the first rank, and read by each other one
        self.slots = words[size * _WORDS_A_LINE :].reshape(_SLOTS, _FIELDS)

    @staticmethod
    def nbytes(size: int) -> int:
        return 8 * (size * _WORDS_A_LINE + _SLOTS * _FIELDS)


class OrderLeader:
    """The first rank's end. `bells` wake the others; `alive` is asked while they are far behind."""

    def __init__(self, order: Order, bells: Sequence[int], alive: Callable[[], bool]) -> None:
        self._order = order
        self._bells = bells
        self._alive = alive

    def say(self, decision: Decision) -> None:
        """Before it is carried out."""
        counts = self._order.counts
        made = int(counts[0])
        while made - int(counts[1:].min()) >= _SLOTS and self._alive():
            time.sleep(_PAUSE_S)
        self._order.slots[made % _SLOTS] = (
            decision.kind,
            decision.layer,
            decision.rows,
            decision.all_greedy,
            decision.needs_logits,
        )
        counts[0] = made + 1
        for bell in self._bells:
            ring(bell)


class OrderFollower:
    """Another rank's end."""

    def __init__(self, order: Order, rank: int) -> None:
        self._order = order
        self._rank = rank

    def next(self) -> Decision | None:
        """The oldest decision that this rank has not carried out."""
        counts = self._order.counts
        read = int(counts[self._rank])
        if read == counts[0]:
            return None
        kind, layer, rows, all_greedy, needs_logits = self._order.slots[read % _SLOTS].tolist()
        counts[self._rank] = read + 1
        return Decision(kind, layer, rows, bool(all_greedy), bool(needs_logits))
