"""How long a scheduled step keeps its device: sums the cost model over a step's rows. Knows steps,
not queues or time of day."""

from collections.abc import Sequence
from dataclasses import dataclass

from dualpace.runtime.schedule.rounds import GpuStep, Row
from dualpace.runtime.simulate.cost import CostModel, Curve
from dualpace.runtime.types import RowKind


@dataclass(frozen=True, slots=True)
class GpuWork:
    """Seconds of a GPU batch: each of its equal layers, and the head after them."""

    layer_s: float
    head_s: float


def kv_tokens(rows: Sequence[Row]) -> int:
    return sum([row.start + row.num_tokens for row in rows])


class GpuWorkModel:
    """Prices a GpuStep. `host_attention` is the CPU kernel that lockstep host rows run (neo);
    `poll_s` is added to a layer of a round in which an assist may be asked for."""

    def __init__(self, cost: CostModel, host_attention: Curve, poll_s: float) -> None:
        self._cost = cost
        self._host_attention = host_attention
        self._poll_s = poll_s

    def price(self, step: GpuStep, polls: bool) -> GpuWork:
        """`polls`: there are requests on the host that may ask for an assist."""
        cost = self._cost
        rows = decodes = context = sampled = 0
        prefill = 0.0
        for row in step.rows:
            if row.kind == RowKind.DECODE:
                decodes += 1
                context += row.start + 1
            else:
                rows += row.num_tokens
                sampled += row.sample
                prefill += cost.gpu_prefill_attention(row.num_tokens, row.start + row.num_tokens)
        rows += decodes
        sampled += decodes
        attention = prefill + (cost.gpu_decode_attention(context) if context else 0.0)
        first, second = step.host_rows
        if not first and not second:
            layer = self._dense(rows) + attention
        else:
            layer = self._pipelined_layer(rows, attention, first, second)
            sampled += len(first) + len(second)
        head = cost.gpu_post_layer(sampled) if sampled else 0.0
        return GpuWork(layer + (self._poll_s if polls else 0.0), head)

    def _pipelined_layer(
        self, rows: int, attention: float, first: Sequence[Row], second: Sequence[Row]
    ) -> float:
        """Figure 4 and Equation 1: linear work of sub-batch 0 runs beside the CPU attention of 1,
        linear work of 1 and GPU attention beside the CPU attention of 0."""
        linear_0, linear_1 = self._dense(rows + len(first)), self._dense(len(second))
        return max(linear_0, self._host(second)) + max(linear_1 + attention, self._host(first))

    def _dense(self, rows: int) -> float:
        if rows == 0:
            return 0.0
        return self._cost.gpu_pre_attention(rows) + self._cost.gpu_post_attention(rows)

    def _host(self, rows: Sequence[Row]) -> float:
        if not rows:
            return 0.0
        return self._host_attention(kv_tokens(rows)) + self._cost.activation_copy(len(rows))
