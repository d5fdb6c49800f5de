"""What NEO's scheduler believes a layer will take: the costs that the simulation then charges, plus
the fixed launch term that it adds to every CPU attention and that nobody is charged."""

from collections.abc import Sequence

from dualpace.runtime.simulate.cost import CostModel, Curve


class LayerPredictor:
    """A `policies.neo.Predictor`; `kernel` is the CPU attention of a layer by KV tokens."""

    def __init__(self, cost: CostModel, kernel: Curve, launch_s: float) -> None:
        self.num_layers = cost.num_layers
        self._cost = cost
        self._kernel = kernel
        self._launch_s = launch_s

    def linear_s(self, num_rows: int) -> float:
        if num_rows == 0:
            return 0.0
        return self._cost.gpu_pre_attention(num_rows) + self._cost.gpu_post_attention(num_rows)

    def gpu_attention_s(self, prefills: Sequence[tuple[int, int]], decode_tokens: int) -> float:
        prompts = sum(self._cost.gpu_prefill_attention(now, after) for now, after in prefills)
        return prompts + (self._cost.gpu_decode_attention(decode_tokens) if decode_tokens else 0.0)

    def cpu_attention_s(self, num_requests: int, kv_tokens: int) -> float:
        if num_requests == 0:
            return 0.0
        exchange = self._cost.activation_copy(num_requests)
        return self._launch_s + self._kernel(kv_tokens) + exchange

    def post_layer_s(self, num_rows: int) -> float:
        return self._cost.gpu_post_layer(num_rows) if num_rows else 0.0
