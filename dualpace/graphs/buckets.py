"""Buckets: the static row counts that stages are compiled for, and how a batch is put into them.

Pure functions of numbers. A batch is not padded to the next bucket but covered by the cheapest set
of buckets, so few of them bound the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FEW = (1, 4, 16, 64, 256, 512)  # compiling costs more than some padding where cores are few
FEW_CORES = 4
# What a call costs beside its rows, in rows: reading the weights, and starting.
CALL_ROWS = 16


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


def covers(costs: Mapping[int, float]) -> list[tuple[int, ...]]:
    """The cheapest buckets for each row count, none to the largest bucket: descending sizes.

    `costs` maps each bucket to what a call costs, in any unit.
    """
    largest = max(costs)
    best = [0.0]
    chosen: list[tuple[int, ...]] = [()]
    for rows in range(1, largest + 1):
        cost, bucket = min((c + best[max(rows - b, 0)], b) for b, c in costs.items())
        best.append(cost)
        chosen.append((bucket, *chosen[max(rows - bucket, 0)]))
    return [tuple(sorted(cover, reverse=True)) for cover in chosen]


def rule_of_thumb(buckets: Sequence[int]) -> dict[int, float]:
    """Costs of calls that nobody has timed."""
    return {bucket: float(bucket + CALL_ROWS) for bucket in buckets}
