"""Buckets: the row counts that stages are compiled and timed for, and how a batch is put into them.

Pure functions of numbers. A batch is not padded to the next bucket but run the cheapest way: padded
to one bucket, in pieces, or as it is where an executable takes any row count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FEW = (1, 4, 16, 64, 256, 512)  # compiling costs more than some padding where cores are few
FEW_CORES = 4
# What a call costs beside its rows, in rows: reading the weights, and starting.
CALL_ROWS = 16
# What each piece of a batch costs beside its kernels: cutting, calling, joining.
PIECE_S = 15e-6


def default_buckets(largest: int, num_cores: int) -> tuple[int, ...]:
    """Ascending buckets for batches of up to `largest` rows; at most 6 where cores are few."""
    ladder = FEW if num_cores <= FEW_CORES else LADDER
    top = min(largest, ladder[-1])
    return (*(size for size in ladder if size < top), top)


def stage_buckets(
    max_tokens: int, max_rows: int, num_cores: int, given: Sequence[int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Buckets of each compiled stage under a plan's limits.

    max_tokens: rows of the largest batch in the layers (tokens of prompts and decodes together)
    max_rows: rows of the largest batch to sample
    num_cores: that build and run them; given: the user's own list, cut to what can be reached.
    """

    def sizes(largest: int) -> tuple[int, ...]:
        if given is None:
            return default_buckets(largest, num_cores)
        below = sorted({size for size in given if size < largest})
        return (*below, largest) if largest <= max(given) else tuple(below)

    return by_stage(sizes(max_tokens), sizes(max_rows))


def by_stage(layers: tuple[int, ...], final: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Each compiled stage's buckets, by those of the layers and of the rows that are sampled."""
    return {
        "pre_attention": layers,
        "post_attention": layers,
        "logits": final,
        "post_layer_greedy": final,
    }


def covers(
    costs: Mapping[int, float], unpadded: Mapping[int, float] | None = None
) -> list[tuple[int, ...]]:
    """The cheapest way to run each row count, none to the largest bucket: descending sizes.

    `costs` maps each bucket to what a call costs, in any unit, cutting and joining included.
    `unpadded` does so for an executable that takes any row count, where there is one: a size that
    is no bucket is run by it. Its cost between two buckets is interpolated.
    """
    largest = max(costs)
    whole = interpolated(unpadded, largest) if unpadded else []
    best = [0.0]
    chosen: list[tuple[int, ...]] = [()]
    for rows in range(1, largest + 1):
        ways = [(cost + best[max(rows - size, 0)], size) for size, cost in costs.items()]
        if whole:
            ways.append((whole[rows], rows))
        cost, size = min(ways)
        best.append(cost)
        chosen.append((size, *chosen[max(rows - size, 0)]))
    return [tuple(sorted(cover, reverse=True)) for cover in chosen]


def interpolated(costs: Mapping[int, float], largest: int) -> list[float]:
    """The cost of each row count, none to `largest`."""
    sizes = sorted(costs)
    found = []
    for rows in range(largest + 1):
        above = min((i for i, size in enumerate(sizes) if size >= rows), default=len(sizes) - 1)
        low, high = sizes[max(above - 1, 0)], sizes[above]
        share = (rows - low) / (high - low) if low < rows < high else 1.0
        found.append(costs[low] + share * (costs[high] - costs[low]))
    return found


def rule_of_thumb(buckets: Sequence[int]) -> dict[int, float]:
    """Costs of calls that nobody has timed."""
    return {bucket: float(bucket + CALL_ROWS) for bucket in buckets}
