"""The executables of one stage by bucket, and which of them a batch of n rows runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dualpace.graphs.backends import Arguments, Stage
from dualpace.graphs.buckets import covers


@dataclass(frozen=True, slots=True)
class Entry:
    """An executable, and the weights of each layer in the layout that it takes."""

    graph: Stage
    weights: list[Arguments]
    pads: bool  # takes its bucket's row count alone; otherwise any up to it
    name: str = ""  # of the backend


@dataclass(frozen=True, slots=True)
class Unpadded:
    """Executables of any row count, the one for each bucket and fewer rows, and what they cost."""

    entries: Mapping[int, Entry]
    costs: Mapping[int, float]

    def entry(self, rows: int) -> Entry:
        return self.entries[min(bucket for bucket in self.entries if bucket >= rows)]


Piece = tuple[int, int, Entry]  # rows of the batch, rows that are computed, and by what


class StageTable:
    """Immutable, so that a better one is swapped in by one assignment."""

    def __init__(
        self,
        entries: Mapping[int, Entry],
        costs: Mapping[int, float],
        unpadded: Unpadded | None = None,
    ) -> None:
        """entries by bucket, or under 0 the one of any row count; costs of a call by bucket."""
        self.any_rows = entries.get(0)
        self.entries = dict(entries)
        self.buckets = sorted(bucket for bucket in entries if bucket)
        self.largest = self.buckets[-1] if self.buckets else 0
        self._unpadded = unpadded
        found = covers(costs, unpadded and unpadded.costs) if self.buckets else []
        # Made ahead of the batches: looking one up is all that a call does.
        self._pieces = [self._cut(sizes, rows) for rows, sizes in enumerate(found)]

    def names(self) -> dict[int, str]:
        """The backend of each bucket; 0 stands for any row count."""
        return {bucket: entry.name for bucket, entry in self.entries.items()}

    def pieces(self, count: int) -> tuple[Piece, ...]:
        """How `count` rows are run, in the order of the rows."""
        if self.any_rows is not None:
            return ((count, count, self.any_rows),)
        if count <= self.largest:
            return self._pieces[count]
        full, rest = divmod(count, self.largest)
        return (*self._pieces[self.largest] * full, *self._pieces[rest])

    def padded(self, count: int) -> int:
        """Rows that are computed for a batch of `count`."""
        return sum(computed for _, computed, _ in self.pieces(count))

    def _cut(self, sizes: tuple[int, ...], count: int) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        for size in sizes:
            rows = min(size, count)
            entry = self.entries.get(size)
            if entry is None:
                assert self._unpadded is not None and rows == size
                entry = self._unpadded.entry(rows)
            pieces.append((rows, size if entry.pads else rows, entry))
            count -= rows
        return tuple(pieces)
