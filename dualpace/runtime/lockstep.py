"""The shared buffer of a GPU round that carries host rows (NEO's pipeline, paper 3.1): for each
sub-batch, one layer's q, k and v go to the CPU worker and attention comes back.

Of several ranks each accelerator's has tensors of its own, for its heads, and every rank of either
side a word of its own, which the ranks of the other side read that have some of these heads.

Each sub-batch has at most one layer under way. Tags only grow over the life of an engine, so what a
dead worker left is never taken for an answer. Knows no torch: tensors are byte regions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from dualpace.runtime.channel import ring
from dualpace.runtime.shared_memory import SharedRegion

SUB_BATCHES = 2
_LINE = 64
_ANY = 1 << 62  # above every tag


def tag(step: int, layer: int, num_layers: int) -> int:
    """Names one layer of one step; larger than every one before."""
    return step * num_layers + layer + 1


@dataclass(frozen=True, slots=True)
class LockstepLayout:
    """Widths in elements of `itemsize` bytes, of one accelerator rank: q and out rows are its
    query heads times the head size.
    """

    max_rows: int
    q_width: int
    kv_width: int
    itemsize: int
    askers: int = 1  # accelerator ranks
    answerers: int = 1  # CPU ranks

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes, within one sub-batch of one accelerator rank."""
        q, kv = (self.max_rows * w * self.itemsize for w in (self.q_width, self.kv_width))
        return {name: -(-n // _LINE) * _LINE for name, n in _sizes(q, kv)}

    @property
    def nbytes(self) -> int:
        words = (self.askers + self.answerers) * _LINE
        return SUB_BATCHES * (words + self.askers * sum(self.parts.values()))


def _sizes(q: int, kv: int) -> list[tuple[str, int]]:
    return [("q", q), ("k", kv), ("v", kv), ("out", q)]


class LockstepBuffer:
    """One side's view. `bytes_of(place, name, asker)` is a part of sub-batch `place` for torch to
    wrap. Asker and answerer are ranks of the accelerator and of the CPU.
    """

    def __init__(self, region: SharedRegion, layout: LockstepLayout) -> None:
        self.layout = layout
        self._view = region.view
        self._size = layout.nbytes // SUB_BATCHES
        # Offsets of words by sub-batch and rank, for a device that writes and reads them.
        self.asked_at = self._lines(0, layout.askers)
        self.answered_at = self._lines(layout.askers, layout.answerers)
        self._asked, self._answered = (
            [[self._word(at) for at in ranks] for ranks in places]
            for places in (self.asked_at, self.answered_at)
        )

    def _lines(self, first: int, count: int) -> list[list[int]]:
        lines = range(first, first + count)
        return [
            [place * self._size + line * _LINE for line in lines] for place in range(SUB_BATCHES)
        ]

    @property
    def memory(self) -> memoryview:
        """All of it, for a device to register."""
        return self._view

    def _word(self, at: int) -> np.ndarray:
        return np.frombuffer(self._view[at : at + 8], np.int64)

    def bytes_of(self, place: int, name: str, asker: int = 0) -> memoryview:
        layout = self.layout
        at = place * self._size + (layout.askers + layout.answerers) * _LINE
        at += asker * sum(layout.parts.values())
        for part, nbytes in layout.parts.items():
            if part == name:
                return self._view[at : at + nbytes]
            at += nbytes
        raise AssertionError(name)

    def ask(self, place: int, number: int, bells: Sequence[int], asker: int = 0) -> None:
        """q, k and v are in place; rings those who have to answer."""
        self._asked[place][asker][0] = number
        for bell in bells:
            ring(bell)

    def is_asked(self, place: int, number: int, asker: int = 0) -> bool:
        return bool(self._asked[place][asker][0] == number)

    def answer(self, place: int, number: int, bells: Sequence[int], answerer: int = 0) -> None:
        """`out` is in place for all who asked; nobody is rung who watches the word himself."""
        self._answered[place][answerer][0] = number
        for bell in bells:
            ring(bell)

    def is_answered(self, place: int, number: int, answerers: Sequence[int] = (0,)) -> bool:
        """By all of them."""
        words = self._answered[place]
        return all(words[rank][0] == number for rank in answerers)

    def answer_all(self, is_answered: bool) -> None:
        """While nobody asks in earnest: nobody waits for an answer (a device's warm-up), or all
        do."""
        for word in chain.from_iterable(self._answered):
            word[0] = _ANY if is_answered else 0
