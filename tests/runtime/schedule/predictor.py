"""Stage times that a test can reason about: a unit a row on the GPU, `cpu_s` a KV token on the
CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dualpace.runtime.step_times import StepTimes


@dataclass
class FlatPredictor:
    """A layer's linear work takes at least `floor_s`; everything in seconds."""

    cpu_s: float = 0.01
    floor_s: float = 4.0
    num_layers: int = 2

    def linear_s(self, num_rows: int) -> float:
        return max(self.floor_s, num_rows) if num_rows else 0.0

    def gpu_attention_s(self, prefills: Sequence[tuple[int, int]], decode_tokens: int) -> float:
        return 0.001 * (sum(n * context for n, context in prefills) + decode_tokens)

    def cpu_attention_s(self, num_requests: int, kv_tokens: int) -> float:
        return self.cpu_s * kv_tokens

    def post_layer_s(self, num_rows: int) -> float:
        return 1.0


def flat_times(
    gpu: float = 1.0,
    cpu: float = 2.0,
    assist: float = 0.0,
    prefill: float = 1.0,
    alone: float | None = None,
) -> StepTimes:
    """Steps of whatever size take so many seconds; `assist` is the GPU's time an iteration, `alone`
    one without it, by default as long."""
    level = {"gpu_dense": gpu, "cpu_dense": cpu, "assist": assist, "prefill": prefill}
    level["cpu_alone"] = cpu if alone is None else alone
    names = ("gpu_attention", "cpu_attention", "cpu_wait")
    curves = {**level, **dict.fromkeys(names, 0.0)}
    return StepTimes.from_points({name: [(1, s), (2, s)] for name, s in curves.items()})
