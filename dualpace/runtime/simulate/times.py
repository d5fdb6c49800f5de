"""What a cost model predicts for whole steps, sampled into the curves that policies judge by."""

from collections.abc import Callable

from dualpace.runtime.routing import Route, route
from dualpace.runtime.simulate.cost import CostModel
from dualpace.runtime.step_times import StepTimes

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KV_TOKENS = tuple(1 << k for k in range(8, 22))  # of a batch
PROMPT_TOKENS = tuple(1 << k for k in range(4, 16))


def step_times(cost: CostModel, limits: tuple[int, int]) -> StepTimes:
    """`limits` are P and F (Equation 5)."""
    edges = {edge for limit in limits for edge in (limit, limit + 1) if edge > 0}
    rows = sorted({*ROWS, *edges})
    layers = cost.num_layers

    def gpu_dense(size: int) -> float:
        layer = cost.gpu_pre_attention(size) + cost.gpu_post_attention(size)
        return layers * layer + cost.gpu_post_layer(size)

    def prefill(tokens: int) -> float:
        layer = cost.gpu_pre_attention(tokens) + cost.gpu_post_attention(tokens)
        layer += cost.gpu_prefill_attention(tokens, tokens)
        return layers * layer + cost.gpu_post_layer(1)

    def by(sizes: list[int] | tuple[int, ...], value: Callable[[int], float]) -> list[list[float]]:
        return [[size, value(size)] for size in sizes]

    return StepTimes.from_points(
        {
            "gpu_dense": by(rows, gpu_dense),
            "gpu_attention": by(KV_TOKENS, lambda kv: layers * cost.gpu_decode_attention(kv)),
            "cpu_dense": by(rows, lambda size: cpu_dense(cost, size, route(size, *limits))),
            "cpu_attention": by(KV_TOKENS, lambda kv: layers * cost.cpu_attention(kv)),
            "cpu_wait": by(rows, lambda size: cpu_wait(cost, route(size, *limits))),
            "assist": by(rows, lambda size: assist(cost, size, route(size, *limits))),
            "prefill": by(PROMPT_TOKENS, prefill),
        }
    )


def cpu_dense(cost: CostModel, rows: int, taken: Route) -> float:
    """An iteration's dense stages wherever they run, without waits for boundaries."""
    layers, buffer_s = cost.num_layers, cost.profile.assist.buffer_us / 1e6
    own = layers * cost.cpu_pre_attention(rows)
    own += sum(count * cost.assist_latency(each) for count, each in assists(cost, rows, taken))
    if taken is Route.FUSED_ASSIST:
        return own + layers * buffer_s
    own += layers * cost.cpu_post_attention(rows)
    return own + (buffer_s if taken is Route.SPLIT_FINAL else cost.cpu_post_layer(rows))


def assist(cost: CostModel, rows: int, taken: Route) -> float:
    """What the assists of an iteration take from the GPU's own rounds."""
    return sum(count * cost.assist_loss(each) for count, each in assists(cost, rows, taken))


def assists(cost: CostModel, rows: int, taken: Route) -> list[tuple[int, float]]:
    """How many of an iteration, and what each takes an idle device."""
    if taken is Route.FUSED_ASSIST:
        early = (cost.num_layers - 1, cost.assist_post_attention(rows))
        return [early, (1, cost.assist_final(rows))]
    return [(1, cost.assist_post_layer(rows))] if taken is Route.SPLIT_FINAL else []


def cpu_wait(cost: CostModel, taken: Route) -> float:
    """Rounds that an iteration waits for boundaries: half a layer and what is queued, an assist."""
    if cost.beside:
        return 0.0
    boundary = (0.5 + cost.profile.assist.queued_stages) / cost.num_layers
    return boundary * {Route.FUSED_ASSIST: cost.num_layers, Route.SPLIT_FINAL: 1}.get(taken, 0)
