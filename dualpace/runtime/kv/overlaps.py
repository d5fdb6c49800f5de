"""Where the parts of two divisions of the same heads meet: tensor-parallel ranks of one tier and
those of the other, which may be more or fewer. Pure arithmetic.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """What one rank's part of something has in common with the part of `other`, a rank of another
    division of it: `own` within the one, `theirs` within the other.
    """

    other: int
    own: slice
    theirs: slice


ALL = Overlap(0, slice(None), slice(None))  # between two that are not divided


def overlaps(count: int, rank: int, size: int, other_size: int) -> tuple[Overlap, ...]:
    """`count` heads (or columns) are divided evenly among `size` ranks here and among `other_size`
    there: where each of `rank`'s lies there, in order. Both sizes divide `count`.
    """
    assert count % size == count % other_size == 0
    width, other_width = count // size, count // other_size
    first, end = rank * width, (rank + 1) * width
    found = []
    for other in range(first // other_width, -(-end // other_width)):
        low, high = max(first, other * other_width), min(end, (other + 1) * other_width)
        theirs = slice(low - other * other_width, high - other * other_width)
        found.append(Overlap(other, slice(low - first, high - first), theirs))
    return tuple(found)
