"""Whole steps put together from the times of their parts, sampled into the curves that policies
judge by. Knows no requests, and not where the times come from: a cost model, or workers that have
timed a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dualpace.runtime.routing import Route, route
from dualpace.runtime.step_times import StepTimes

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KV_TOKENS = tuple(1 << k for k in range(8, 22))  # of a batch
PROMPT_TOKENS = tuple(1 << k for k in range(4, 16))

Seconds = Callable[[int], float]  # by size
OfSeconds = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Seconds: of one layer where a part belongs to a layer; by rows unless said otherwise."""

    num_layers: int
    gpu_layer: Seconds  # pre- and post-attention
    gpu_post_layer: Seconds
    gpu_decode_attention: Seconds  # by KV tokens
    gpu_prefill_attention: Seconds  # by tokens of one prompt
    cpu_pre_attention: Seconds
    cpu_post_attention: Seconds
    cpu_post_layer: Seconds
    cpu_attention: Seconds  # by KV tokens
    # What an assist of each kind takes an idle device
    assist_post_attention: Seconds
    assist_final: Seconds
    assist_post_layer: Seconds
    # Of that time: until the host sees the result, without the wait for a boundary, and what the
    # main batch loses
    assist_latency: OfSeconds
    assist_loss: OfSeconds
    buffer_s: float  # the host writes and reads the assist buffer
    stages_before: float  # layers of the main batch that an assist waits for, mean; 0: beside them


def step_times(parts: StepParts, limits: tuple[int, int]) -> StepTimes:
    """`limits` are P and F (Equation 5)."""
    edges = {edge for limit in limits for edge in (limit, limit + 1) if edge > 0}
    rows = sorted({*ROWS, *edges})
    layers = parts.num_layers

    def prefill(tokens: int) -> float:
        layer = parts.gpu_layer(tokens) + parts.gpu_prefill_attention(tokens)
        return layers * layer + parts.gpu_post_layer(1)

    def by(sizes: list[int] | tuple[int, ...], value: Seconds) -> list[list[float]]:
        return [[size, value(size)] for size in sizes]

    return StepTimes.from_points(
        {
            "gpu_dense": by(rows, lambda n: layers * parts.gpu_layer(n) + parts.gpu_post_layer(n)),
            "gpu_attention": by(KV_TOKENS, lambda kv: layers * parts.gpu_decode_attention(kv)),
            "cpu_dense": by(rows, lambda n: _cpu_dense(parts, n, route(n, *limits))),
            "cpu_alone": by(rows, lambda n: _cpu_dense(parts, n, Route.FULL_CPU)),
            "cpu_attention": by(KV_TOKENS, lambda kv: layers * parts.cpu_attention(kv)),
            "cpu_wait": by(rows, lambda n: _cpu_wait(parts, route(n, *limits))),
            "assist": by(rows, lambda n: _assist(parts, n, route(n, *limits))),
            "prefill": by(PROMPT_TOKENS, prefill),
        }
    )


def _cpu_dense(parts: StepParts, rows: int, taken: Route) -> float:
    """An iteration's dense stages wherever they run, without waits for boundaries."""
    layers = parts.num_layers
    own = layers * parts.cpu_pre_attention(rows)
    own += sum(count * parts.assist_latency(each) for count, each in _assists(parts, rows, taken))
    if taken is Route.FUSED_ASSIST:
        return own + layers * parts.buffer_s
    own += layers * parts.cpu_post_attention(rows)
    return own + (parts.buffer_s if taken is Route.SPLIT_FINAL else parts.cpu_post_layer(rows))


def _assist(parts: StepParts, rows: int, taken: Route) -> float:
    """What the assists of an iteration take from the GPU's own rounds."""
    return sum(count * parts.assist_loss(each) for count, each in _assists(parts, rows, taken))


def _assists(parts: StepParts, rows: int, taken: Route) -> list[tuple[int, float]]:
    """How many of an iteration, and what each takes an idle device."""
    if taken is Route.FUSED_ASSIST:
        early = (parts.num_layers - 1, parts.assist_post_attention(rows))
        return [early, (1, parts.assist_final(rows))]
    return [(1, parts.assist_post_layer(rows))] if taken is Route.SPLIT_FINAL else []


def _cpu_wait(parts: StepParts, taken: Route) -> float:
    """Rounds that an iteration waits for boundaries."""
    boundary = parts.stages_before / parts.num_layers
    return boundary * {Route.FUSED_ASSIST: parts.num_layers, Route.SPLIT_FINAL: 1}.get(taken, 0)
