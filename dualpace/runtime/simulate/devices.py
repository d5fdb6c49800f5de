"""The two devices of a simulated machine: when a batch that starts now ends, and what one device
costs the other. Knows nothing about requests or queues; times are seconds on the virtual clock.

A CPU iteration asks for Dense Assist at every layer. Between stages an assist waits for the
boundary that the GPU's main batch reaches next, and moves that batch's end by the time it took.
Beside the batch it starts at once, takes longer, and moves the end by a share of its time.
"""

import math
from dataclasses import dataclass

from dualpace.runtime.routing import Route
from dualpace.runtime.simulate.cost import CostModel


@dataclass(slots=True)
class Main:
    """The GPU's batch: fixed time first, then layers of equal length, then the head."""

    start_s: float
    layers_s: float  # when the first layer starts, moved by assists
    layer_s: float
    end_s: float
    first_layer_s: float  # when the first layer's K/V exist


class Gpu:
    """Runs one main batch at a time, and assists at its stage boundaries or beside it."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._queued = cost.profile.assist.queued_stages
        self.free_s = 0.0
        self.main: Main | None = None
        self.busy_s = 0.0
        self.assist_s = 0.0

    def start(self, now: float, before_s: float, layer_s: float, head_s: float) -> Main:
        """Begin a main batch as soon as the device is free."""
        start = max(now, self.free_s)
        layers = start + before_s
        end = layers + layer_s * self._cost.num_layers + head_s
        self.main = Main(start, layers, layer_s, end, layers + layer_s)
        self.busy_s += end - start
        self.free_s = end
        return self.main

    def finish(self) -> None:
        self.main = None

    def assist(self, now: float, device_s: float) -> float:
        """Serve one assist asked for at `now` that takes an idle device so long; returns when its
        result is visible (Equation 14: wait, launch, CUDA and finalize)."""
        lost = self._cost.assist_loss(device_s)
        self.assist_s += lost
        main = self.main
        if self._cost.beside:
            self._delay(now, lost)
            return now + self._cost.assist_latency(device_s, idle=main is None)
        begin = max(now, self.free_s) if main is None else now + self._wait(now, main)
        self._delay(begin, lost)
        return begin + lost

    def _delay(self, begin: float, lost: float) -> None:
        """An assist that begins at `begin` takes so much of the main batch, or the next one."""
        main = self.main
        if main is None or begin >= main.end_s:
            self.free_s = max(begin, self.free_s) + lost
        else:
            main.layers_s += lost
            main.end_s += lost
            self.free_s = main.end_s

    def _wait(self, now: float, main: Main) -> float:
        """Seconds to the boundary at which the worker looks next."""
        left = main.end_s - now
        if now < main.layers_s:
            return min(main.layers_s - now, left)
        into = now - main.layers_s
        if into >= main.layer_s * self._cost.num_layers:  # in the head, which is one stage
            return left
        done = into / main.layer_s
        return min((math.ceil(done) - done + self._queued) * main.layer_s, left)


@dataclass(slots=True)
class Iteration:
    """A CPU batch under way: `next_s` is when it next needs the GPU, or ends."""

    start_s: float
    next_s: float
    rows: int
    local_s: float  # one layer's work before the next assist
    assists_left: int


class Cpu:
    """Runs one decode iteration at a time by one of the three routes."""

    def __init__(self, cost: CostModel, gpu: Gpu) -> None:
        self._cost = cost
        self._gpu = gpu
        self.busy_s = 0.0
        self.last_start_s = 0.0
        self.iteration: Iteration | None = None

    def start(self, now: float, rows: int, kv_tokens: int, route: Route) -> Iteration:
        cost = self._cost
        buffer = cost.profile.assist.buffer_us / 1e6
        layer = cost.cpu_pre_attention(rows) + cost.cpu_attention(kv_tokens)
        if route is Route.FUSED_ASSIST:
            local = layer + buffer
            run = Iteration(now, now + local, rows, local, cost.num_layers)
        else:
            total = cost.num_layers * (layer + cost.cpu_post_attention(rows))
            full = route is Route.FULL_CPU
            last = cost.cpu_post_layer(rows) if full else buffer
            run = Iteration(now, now + total + last, rows, 0.0, 0 if full else 1)
        self.iteration = run
        self.last_start_s = now
        return run

    def advance(self) -> bool:
        """Pass the point at `next_s`: serve the assist asked for there; True if the batch ended."""
        run = self.iteration
        assert run is not None
        if run.assists_left == 0:
            self.busy_s += run.next_s - run.start_s
            self.iteration = None
            return True
        run.assists_left -= 1
        if run.assists_left:
            device = self._cost.assist_post_attention(run.rows)
            run.next_s = self._gpu.assist(run.next_s, device) + run.local_s
        elif run.local_s:
            run.next_s = self._gpu.assist(run.next_s, self._cost.assist_final(run.rows))
        else:
            run.next_s = self._gpu.assist(run.next_s, self._cost.assist_post_layer(run.rows))
        return False


class Link:
    """Both directions between HBM and host memory; copies of one direction queue up."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.to_host_free_s = 0.0
        self.to_gpu_free_s = 0.0
        self.to_host_bytes = 0.0
        self.to_gpu_bytes = 0.0

    def to_host(self, now: float, num_blocks: int) -> float:
        """When a copy of whole KV blocks that is issued now has drained."""
        size = num_blocks * self._cost.kv_block_bytes
        self.to_host_bytes += size
        self.to_host_free_s = max(now, self.to_host_free_s) + self._cost.copy(size)
        return self.to_host_free_s

    def stream_to_host(self, first_s: float, end_s: float, num_blocks: int) -> float:
        """When layer-wise copies have drained: the first layer exists at `first_s`, the last one at
        `end_s`, and each is copied as soon as it exists."""
        drained = self.to_host(first_s, num_blocks)
        last = self._cost.copy(num_blocks * self._cost.kv_block_bytes / self._cost.num_layers)
        self.to_host_free_s = max(drained, end_s + last)
        return self.to_host_free_s

    def to_gpu(self, now: float, num_blocks: int) -> float:
        size = num_blocks * self._cost.kv_block_bytes
        self.to_gpu_bytes += size
        self.to_gpu_free_s = max(now, self.to_gpu_free_s) + self._cost.copy(size)
        return self.to_gpu_free_s
