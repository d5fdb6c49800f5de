"""What a stage costs on a profiled machine, in seconds. Knows nothing about requests, queues or
time of day: sizes in, seconds out.

A primitive is a roofline (the slower of memory and arithmetic) unless the profile holds a table of
its name. Rows are tokens in a dense stage; KV tokens are context lengths summed over a batch.
"""

from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise

from dualpace.block import BLOCK_TOKENS
from dualpace.errors import ConfigError
from dualpace.runtime.simulate.config import ProfileConfig, TableConfig

BF16 = 2  # bytes

Curve = Callable[[float], float]


def table(name: str, config: TableConfig) -> Curve:
    """A piecewise linear curve in seconds over measured points in ms."""
    x, ms = list(config.x), list(config.ms)
    if len(x) != len(ms) or len(x) < 2 or any(a >= b for a, b in pairwise(x)):
        raise ConfigError(
            f"simulated.tables.{name} needs two or more points, x rising and as many ms; "
            f"it has {len(x)} x and {len(ms)} ms."
        )

    def curve(size: float) -> float:
        if size <= x[0]:
            return ms[0] / 1e3
        i = min(bisect_right(x, size), len(x) - 1)
        slope = (ms[i] - ms[i - 1]) / (x[i] - x[i - 1])
        return (ms[i - 1] + slope * (size - x[i - 1])) / 1e3

    return curve


class CostModel:
    """Seconds of every primitive of Appendix B and of the GPU's own rounds.

    Names of primitives, which are the keys of `simulated.tables` too (one layer each where a stage
    belongs to a layer): gpu_pre_attention, gpu_post_attention, gpu_post_layer,
    gpu_decode_attention, cpu_pre_attention, cpu_post_attention, cpu_post_layer, cpu_attention; and
    by rows the device's interval of each kind of assist while it has nothing else to do:
    assist_post_attention, assist_final, assist_post_layer.
    """

    def __init__(
        self, profile: ProfileConfig, cpu_tp: int = 1, assist_mode: str = "stream"
    ) -> None:
        """Assists are served between stages where `assist_mode` or the profile says so."""
        self.profile = profile
        self.beside = assist_mode == "stream" and profile.assist.beside_loss is not None
        self._cpu_tp = cpu_tp
        shape = profile.shape
        self.num_layers = shape.num_layers
        q_width = shape.num_q_heads * shape.head_dim
        kv_width = shape.num_kv_heads * shape.head_dim
        self._pre_weights = shape.hidden * (q_width + 2 * kv_width)
        self._post_weights = q_width * shape.hidden + 3 * shape.hidden * shape.intermediate
        self._head_weights = shape.hidden * shape.vocab
        self._q_width = q_width
        self._row_bytes = shape.hidden * BF16
        self.kv_token_layer_bytes = 2 * kv_width * BF16
        self.kv_block_bytes = self.kv_token_layer_bytes * shape.num_layers * BLOCK_TOKENS
        self._tables = {name: table(name, points) for name, points in profile.tables.items()}
        unknown = self._tables.keys() - PRIMITIVES
        if unknown:
            raise ConfigError(
                f"simulated.tables has {', '.join(sorted(unknown))}, known are "
                f"{', '.join(sorted(PRIMITIVES))}."
            )

    # GPU, one layer each except post_layer

    @cached_property
    def gpu_pre_attention(self) -> Curve:
        return self._gpu_dense("gpu_pre_attention", self._pre_weights, reduces=False)

    @cached_property
    def gpu_post_attention(self) -> Curve:
        return self._gpu_dense("gpu_post_attention", self._post_weights, reduces=True)

    @cached_property
    def gpu_post_layer(self) -> Curve:
        return self._gpu_dense("gpu_post_layer", self._head_weights, reduces=False)

    @cached_property
    def gpu_decode_attention(self) -> Curve:
        """One layer, by KV tokens read."""
        if own := self._tables.get("gpu_decode_attention"):
            return own
        gpu = self.profile.gpu
        seconds = self.kv_token_layer_bytes / (gpu.memory_gb_s * 1e9 * gpu.attention_efficiency)
        return lambda kv_tokens: kv_tokens * seconds

    def gpu_prefill_attention(self, num_tokens: int, context_len: int) -> float:
        """One layer: `num_tokens` new tokens, the last of which sees `context_len`."""
        gpu = self.profile.gpu
        pairs = num_tokens * (context_len - (num_tokens - 1) / 2)
        return 4 * self._q_width * pairs / (gpu.tflops * 1e12 * gpu.prefill_attention_efficiency)

    # CPU, one layer each except post_layer

    @cached_property
    def cpu_pre_attention(self) -> Curve:
        return self._cpu_dense("cpu_pre_attention", self._pre_weights, reduces=False)

    @cached_property
    def cpu_post_attention(self) -> Curve:
        return self._cpu_dense("cpu_post_attention", self._post_weights, reduces=True)

    @cached_property
    def cpu_post_layer(self) -> Curve:
        return self._cpu_dense("cpu_post_layer", self._head_weights, reduces=False)

    @cached_property
    def cpu_attention(self) -> Curve:
        """One layer of our bf16 kernel, by KV tokens read."""
        if own := self._tables.get("cpu_attention"):
            return own
        return self._host_read(self.profile.cpu.attention_efficiency)

    @cached_property
    def cpu_attention_fp16(self) -> Curve:
        """One layer of a kernel that widens fp16 without AMX, by KV tokens read."""
        return self._host_read(self.profile.cpu.fp16_attention_efficiency)

    # Link and Dense Assist

    def copy(self, num_bytes: float) -> float:
        """One copy over the link, one direction."""
        link = self.profile.link
        return link.latency_us / 1e6 + num_bytes / (link.gb_s * 1e9)

    def assist_post_attention(self, rows: int) -> float:
        """g_p: residual and attention output in, hidden state out, post-attention between."""
        if own := self._tables.get("assist_post_attention"):
            return own(rows)
        attention_bytes = rows * self._q_width * BF16
        moved = self.copy(rows * self._row_bytes + attention_bytes)
        return moved + self.gpu_post_attention(rows) + self.copy(rows * self._row_bytes)

    def assist_final(self, rows: int) -> float:
        """g_lA: the last post-attention with the post-layer; 4-byte token ids come back."""
        if own := self._tables.get("assist_final"):
            return own(rows)
        attention_bytes = rows * self._q_width * BF16
        moved = self.copy(rows * self._row_bytes + attention_bytes)
        dense = self.gpu_post_attention(rows) + self.gpu_post_layer(rows)
        return moved + dense + self.copy(4 * rows)

    def assist_post_layer(self, rows: int) -> float:
        """g_lS: the post-layer alone, for Split-Final."""
        if own := self._tables.get("assist_post_layer"):
            return own(rows)
        return self.copy(rows * self._row_bytes) + self.gpu_post_layer(rows) + self.copy(4 * rows)

    def assist_latency(self, device_s: float, *, idle: bool = False) -> float:
        """From asking for an assist until its result is seen, without the wait for a boundary;
        `device_s` is what it takes an idle device."""
        assist = self.profile.assist
        if self.beside and not idle:
            return assist.beside_wait_ms / 1e3 + assist.beside_stretch * device_s
        return (assist.launch_ms + assist.finalize_ms) / 1e3 + device_s

    def assist_loss(self, device_s: float) -> float:
        """GPU time that an assist takes from the main batch: between stages all of it, beside the
        batch what both lack of the same memory and multiprocessors."""
        assist = self.profile.assist
        if not self.beside:
            return (assist.launch_ms + assist.finalize_ms) / 1e3 + device_s
        assert assist.beside_loss is not None
        return assist.beside_loss * assist.beside_stretch * device_s

    def activation_copy(self, rows: int) -> float:
        """Q, K and V of one layer to the host and the attention output back, link time alone."""
        there = rows * (self._q_width * BF16 + self.kv_token_layer_bytes)
        return self.copy(there) + self.copy(rows * self._q_width * BF16)

    # Rooflines

    def _gpu_dense(self, name: str, weights: int, *, reduces: bool) -> Curve:
        if own := self._tables.get(name):
            return own
        gpu = self.profile.gpu
        read = weights * BF16 / (gpu.memory_gb_s * 1e9 * gpu.memory_efficiency)
        row = 2 * weights / (gpu.tflops * 1e12 * gpu.gemm_efficiency)
        fixed = gpu.layer_us / 2e6
        if gpu.tp == 1 or not reduces:
            return lambda rows: fixed + max(read, row * rows)
        # The layer's two all-reduces, after the O projection and after the FFN, both lie here.
        fixed += 2 * gpu.all_reduce_us / 1e6
        payload = 2 * self._row_bytes / (gpu.all_reduce_gb_s * 1e9)
        return lambda rows: fixed + max(read, row * rows) + payload * rows

    def _cpu_dense(self, name: str, weights: int, *, reduces: bool) -> Curve:
        cpu, ranks = self.profile.cpu, self._cpu_tp
        read = weights * BF16 / (cpu.memory_gb_s * 1e9 * cpu.weight_efficiency * ranks)
        row = 2 * weights / (cpu.tflops * 1e12 * ranks)
        fixed = cpu.layer_us / 2e6
        own = self._tables.get(name)
        alone = (lambda r: own(r) / ranks) if own else (lambda r: fixed + max(read, row * r))
        if ranks == 1 or not reduces:
            return alone
        reduce = 2 * cpu.all_reduce_us / 1e6
        payload = 2 * self._row_bytes / (cpu.all_reduce_gb_s * 1e9)
        return lambda rows: alone(rows) + reduce + payload * rows

    def _host_read(self, efficiency: float) -> Curve:
        rate = self.profile.cpu.memory_gb_s * 1e9 * efficiency * self._cpu_tp
        seconds = self.kv_token_layer_bytes / rate
        return lambda kv_tokens: kv_tokens * seconds


PRIMITIVES = frozenset(
    (
        "gpu_pre_attention",
        "gpu_post_attention",
        "gpu_post_layer",
        "gpu_decode_attention",
        "cpu_pre_attention",
        "cpu_post_attention",
        "cpu_post_layer",
        "cpu_attention",
        "assist_post_attention",
        "assist_final",
        "assist_post_layer",
    )
)
