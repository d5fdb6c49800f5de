"""Routing scores of Appendix B from a cost model: what `profile_hw` measures on a machine, computed
for a simulated one. Knows nothing about thresholds; Algorithm 1 fits them to these scores."""

from collections.abc import Sequence

from dualpace.runtime.simulate.cost import CostModel


def route_scores(
    cost: CostModel, batch_sizes: Sequence[int], gpu_weight: float = 1.0
) -> dict[str, list[float]]:
    """S_r(b) in ms (Equations 6-8) under the names of the routes; `gpu_weight` is lambda_GPU."""
    assist = cost.profile.assist
    outside = (assist.launch_ms + assist.finalize_ms) / 1e3  # o_x, and the wait beyond CUDA
    buffer = assist.buffer_us / 1e6
    layers = cost.num_layers
    scores: dict[str, list[float]] = {"FULL_CPU": [], "SPLIT_FINAL": [], "FUSED_ASSIST": []}
    for rows in batch_sizes:
        local_post = layers * cost.cpu_post_attention(rows)
        middle = outside + cost.assist_post_attention(rows)
        final = outside + cost.assist_final(rows)
        split = outside + cost.assist_post_layer(rows)
        fused = (layers - 1) * middle + final
        scores["FULL_CPU"].append(1e3 * (local_post + cost.cpu_post_layer(rows)))
        scores["SPLIT_FINAL"].append(1e3 * (local_post + buffer + split + gpu_weight * split))
        scores["FUSED_ASSIST"].append(1e3 * (layers * buffer + fused + gpu_weight * fused))
    return scores
