"""Routing scores of a simulated machine: Appendix B's primitives from a cost model instead of a
measurement. Knows nothing about thresholds; Algorithm 1 fits them to these scores."""

from collections.abc import Sequence

from dualpace.runtime import scores
from dualpace.runtime.assist import AssistKind
from dualpace.runtime.routing import Route
from dualpace.runtime.scores import Calibration, Primitives
from dualpace.runtime.simulate.cost import CostModel


def route_scores(
    cost: CostModel, batch_sizes: Sequence[int], gpu_weight: float = 1.0
) -> dict[Route, list[float]]:
    """S_r(b) in ms (Equations 6-8); `gpu_weight` is lambda_GPU."""
    assist = cost.profile.assist
    outside = dict.fromkeys(AssistKind, assist.launch_ms + assist.finalize_ms)
    rows = [primitives(cost, size) for size in batch_sizes]
    return scores.route_scores(rows, Calibration(outside, outside), cost.num_layers, gpu_weight)


def primitives(cost: CostModel, rows: int) -> Primitives:
    """One batch size; the buffer's cost is the profile's, for writing and reading together."""
    buffer_ms = cost.profile.assist.buffer_us / 1e3
    return Primitives(
        post_attention=1e3 * cost.cpu_post_attention(rows),
        post_layer=1e3 * cost.cpu_post_layer(rows),
        write=buffer_ms,
        read=0.0,
        write_final=buffer_ms,
        assist={
            AssistKind.POST_ATTENTION: 1e3 * cost.assist_post_attention(rows),
            AssistKind.POST_ATTENTION_FINAL: 1e3 * cost.assist_final(rows),
            AssistKind.POST_LAYER: 1e3 * cost.assist_post_layer(rows),
        },
    )
