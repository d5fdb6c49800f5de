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
    static: bool  # takes its bucket's row count alone; otherwise any up to it
    name: str = ""  # of the backend


class StageTable:
    """Immutable, so that a better one is swapped in by one assignment."""

    def __init__(self, entries: Mapping[int, Entry], costs: Mapping[int, float]) -> None:
        """entries by bucket, or under 0 the one of any row count; costs of a call by bucket."""
        self.any_rows = entries.get(0)
        self.entries = dict(entries)
        self.buckets = sorted(bucket for bucket in entries if bucket)
        self.largest = self.buckets[-1] if self.buckets else 0
        self._covers = covers({bucket: costs[bucket] for bucket in self.buckets}) if costs else []

    def names(self) -> dict[int, str]:
        """The backend of each bucket; 0 stands for any row count."""
        return {bucket: entry.name for bucket, entry in self.entries.items()}

    def exact(self, count: int) -> Entry | None:
        """What runs `count` rows as they are, without padding or cutting."""
        return self.any_rows or self.entries.get(count)

    def cover(self, count: int) -> tuple[int, ...]:
        """Buckets for `count` rows, in the order of the rows; together they hold them all."""
        full, rest = divmod(count, self.largest)
        return (*[self.largest] * full, *self._covers[rest])

    def padded(self, count: int) -> int:
        """Rows that are computed for a batch of `count`."""
        if self.exact(count) is not None:
            return count
        sizes = self.cover(count)
        last = sizes[-1]
        spare = sum(sizes) - count
        return count if not self.entries[last].static else count + spare
