"""Stage times that a test can reason about: a unit a row on the GPU, `cpu_s` a KV token on the
CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass


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
