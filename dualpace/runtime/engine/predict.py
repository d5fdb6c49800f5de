"""What a layer of a round will take, from times that the workers measured when they started: what
Equation 1 of a lockstep policy (neo) is judged by.

Knows no torch. Until both workers are ready everything takes no time.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

Points = tuple[list[float], list[float]]  # sizes in order, their seconds
_NOTHING: Points = ([], [])


class MeasuredPredictor:
    """A `policies.neo.Predictor`. `extra_s` is added to each CPU attention, as NEO does."""

    def __init__(self, num_layers: int, extra_s: float) -> None:
        self.num_layers = num_layers
        self._extra_s = extra_s
        self._tables: dict[str, Points] = {}

    def learn(self, timings: Mapping[str, Any]) -> None:
        """`timings[name]` lists (size, seconds): linear and post_layer by rows, decode, prefill
        (tokens times context) and host by KV tokens; exchange, the way of host rows' activations,
        by rows, where that takes any time."""
        for name, points in timings.items():
            pairs = sorted((float(size), float(time)) for size, time in points)
            self._tables[name] = [size for size, _ in pairs], [time for _, time in pairs]

    def linear_s(self, num_rows: int) -> float:
        return self._at("linear", num_rows)

    def gpu_attention_s(self, prefills: Sequence[tuple[int, int]], decode_tokens: int) -> float:
        pairs = sum(now * after for now, after in prefills)
        return self._at("prefill", pairs) + self._at("decode", decode_tokens)

    def cpu_attention_s(self, num_requests: int, kv_tokens: int) -> float:
        if not num_requests:
            return 0.0
        return self._extra_s + self._at("host", kv_tokens) + self._at("exchange", num_requests)

    def post_layer_s(self, num_rows: int) -> float:
        return self._at("post_layer", num_rows)

    def _at(self, name: str, size: float) -> float:
        """Linear between measured sizes, the outer ones' lines beyond them; 0 for nothing."""
        sizes, times = self._tables.get(name, _NOTHING)
        if size == 0 or not sizes:
            return 0.0
        if len(sizes) == 1 or size <= sizes[0]:
            return times[0]
        end = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        x, y = sizes[end - 1], times[end - 1]
        return max(y + (times[end] - y) * (size - x) / (sizes[end] - x), 0.0)
