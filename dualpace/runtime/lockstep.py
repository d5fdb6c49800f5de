"""The shared buffer of a GPU round that carries host rows (NEO's pipeline, paper 3.1): for each
sub-batch, one layer's q, k and v go to the CPU worker and attention comes back.

Each sub-batch has at most one layer under way. Tags only grow over the life of an engine, so what a
dead worker left is never taken for an answer. Knows no torch: tensors are byte regions.
"""

from dataclasses import dataclass

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
    """Widths in elements of `itemsize` bytes: q and out rows are q_heads * head_dim wide."""

    max_rows: int
    q_width: int
    kv_width: int
    itemsize: int

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes, within one sub-batch."""
        q, kv = (self.max_rows * w * self.itemsize for w in (self.q_width, self.kv_width))
        return {name: -(-n // _LINE) * _LINE for name, n in _sizes(q, kv)}

    @property
    def nbytes(self) -> int:
        return SUB_BATCHES * (2 * _LINE + sum(self.parts.values()))


def _sizes(q: int, kv: int) -> list[tuple[str, int]]:
    return [("q", q), ("k", kv), ("v", kv), ("out", q)]


class LockstepBuffer:
    """One side's view. `bytes_of(place, name)` is a part of sub-batch `place` for torch to wrap."""

    def __init__(self, region: SharedRegion, layout: LockstepLayout) -> None:
        self.layout = layout
        self._view = region.view
        self._size = layout.nbytes // SUB_BATCHES
        # Offsets of the two words of each sub-batch, for a device that writes and reads them.
        self.asked_at = [place * self._size for place in range(SUB_BATCHES)]
        self.answered_at = [at + _LINE for at in self.asked_at]
        self._asked = [self._word(at) for at in self.asked_at]
        self._answered = [self._word(at) for at in self.answered_at]

    @property
    def memory(self) -> memoryview:
        """All of it, for a device to register."""
        return self._view

    def _word(self, at: int) -> np.ndarray:
        return np.frombuffer(self._view[at : at + 8], np.int64)

    def bytes_of(self, place: int, name: str) -> memoryview:
        at = place * self._size + 2 * _LINE
        for part, nbytes in self.layout.parts.items():
            if part == name:
                return self._view[at : at + nbytes]
            at += nbytes
        raise AssertionError(name)

    def ask(self, place: int, number: int, cpu_doorbell: int) -> None:
        """q, k and v are in place."""
        self._asked[place][0] = number
        ring(cpu_doorbell)

    def is_asked(self, place: int, number: int) -> bool:
        return bool(self._asked[place][0] == number)

    def answer(self, place: int, number: int, gpu_doorbell: int | None) -> None:
        """`out` is in place; None for a device that watches the word itself."""
        self._answered[place][0] = number
        if gpu_doorbell is not None:
            ring(gpu_doorbell)

    def is_answered(self, place: int, number: int) -> bool:
        return bool(self._answered[place][0] == number)

    def answer_all(self, is_answered: bool) -> None:
        """While nobody asks in earnest: nobody waits for an answer (a device's warm-up), or all
        do."""
        for word in self._answered:
            word[0] = _ANY if is_answered else 0
