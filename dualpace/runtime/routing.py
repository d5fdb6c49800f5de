"""Where a CPU batch runs its post-attention and post-layer stages: Equation 5. Knows only sizes."""

from enum import StrEnum


class Route(StrEnum):
    """Placement of post-attention and post-layer for one CPU decode batch."""

    FULL_CPU = "full_cpu"  # every stage on the CPU
    SPLIT_FINAL = "split_final"  # layers on the CPU, the post-layer as one assist
    FUSED_ASSIST = "fused_assist"  # every post-attention as an assist, the last with the post-layer


ROUTES = tuple(Route)
"""A message names a route by its place here."""


def route(batch_size: int, post_attention_limit: int, post_layer_limit: int) -> Route:
    """Route of a batch of `batch_size` rows by the thresholds P and F (Equation 5).

    `post_attention_limit` (P) and `post_layer_limit` (F) are the largest batches that run their
    post-attention and their post-layer on the CPU. Legal are (0, 0) and 0 <= F < P.
    Raises ValueError on other thresholds or an empty batch.
    """
    p, f = post_attention_limit, post_layer_limit
    if (p, f) != (0, 0) and not 0 <= f < p:
        raise ValueError(f"thresholds (P={p}, F={f}) are illegal: use (0, 0) or 0 <= F < P")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} has no route: a batch has at least one row")
    if batch_size <= f:
        return Route.FULL_CPU
    return Route.SPLIT_FINAL if batch_size <= p else Route.FUSED_ASSIST
