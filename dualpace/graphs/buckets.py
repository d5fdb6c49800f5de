"""Buckets: the static row counts that stages are compiled for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def bucket_of(num_rows: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds `num_rows` rows; ValueError if none."""
    if num_rows < 1:
        raise ValueError(f"a batch has at least one row, not {num_rows}")
    index = bisect_left(buckets, num_rows)
    if index == len(buckets):
        raise ValueError(
            f"{num_rows} rows do not fit the largest bucket, {buckets[-1] if buckets else 0}; "
            "raise compile.buckets or lower the batch limit"
        )
    return buckets[index]


def default_buckets(largest: int) -> tuple[int, ...]:
    """Few buckets, so that a cold start stays short: 1, 8, 32, 128, 512 up to `largest` rows."""
    return (*(size for size in (1, 8, 32, 128, 512) if size < largest), min(largest, 512))


def pieces_of(num_rows: int, largest: int) -> list[tuple[int, int]]:
    """Cut rows into pieces of at most `largest`: [(start, end), ...]."""
    return [(i, min(i + largest, num_rows)) for i in range(0, num_rows, largest)]
