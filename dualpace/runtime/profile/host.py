"""The CPU worker in this process: the very parts that serve, with a clock on each assist's wait."""

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from dualpace.graphs.weights import DTYPES
from dualpace.runtime.assist import AssistKind
from dualpace.runtime.channel import Channel
from dualpace.runtime.messages import CpuBatch, StepDone
from dualpace.runtime.plan import Plan
from dualpace.runtime.routing import Route
from dualpace.runtime.wiring import kv_layout
from dualpace.runtime.worker.attention import DecodeAttention
from dualpace.runtime.worker.build import worker_stages
from dualpace.runtime.worker.cpu_worker import CpuWorker
from dualpace.runtime.worker.kv_pools import HostPool
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.progress import Progress
from dualpace.runtime.worker.routes import AssistClient, FullCpu, FusedAssist, RouteRun, SplitFinal
from dualpace.runtime.worker.rows import SamplingArrays


def say(text: str) -> None:
    """Into this process's log, whose last line the sweep shows."""
    print(text, flush=True)


Wait = tuple[AssistKind, int, float]  # kind, rows, seconds


class TimedClient(AssistClient):
    """Remembers how long each assist kept the CPU worker waiting."""

    def __init__(self, link: Link, dtype: torch.dtype) -> None:
        super().__init__(link, dtype)
        self.waits: list[Wait] = []

    def ask(self, kind: AssistKind, layer: int, num_rows: int) -> None:
        started = time.perf_counter()
        super().ask(kind, layer, num_rows)
        self.waits.append((kind, num_rows, time.perf_counter() - started))


class LayersOnly(FullCpu):
    """Full-CPU without its post-layer: what the layers of a decode iteration take."""

    def tokens(self, x: Tensor, sampling: SamplingArrays) -> Tensor:
        return torch.zeros(len(x), dtype=torch.int32)


class HostWorker:
    """`iterate` runs a whole decode iteration; the parts are there to be timed by themselves."""

    def __init__(self, plan: Plan, link: Link, channel: Channel) -> None:
        self._channel = channel
        dtype = DTYPES[plan.model.dtype]
        width = plan.model.num_q_heads * plan.model.head_dim
        self.num_layers = plan.model.num_layers
        self.stages = worker_stages(plan, "cpu", Progress(say))
        pool = HostPool(link.host_pool, kv_layout(plan), plan.kv.host_pool_blocks, dtype)
        self.attention = DecodeAttention(pool.layers, plan.model.num_q_heads, plan.cpu.threads)
        self.attention.warm_up()
        self.client = TimedClient(link, dtype)
        self.full = FullCpu(self.stages, width)
        self.split = SplitFinal(self.stages, width, self.client)
        self.fused = FusedAssist(self.client, self.num_layers)
        routes: Mapping[Route, RouteRun] = {
            Route.FULL_CPU: LayersOnly(self.stages, width),
            Route.SPLIT_FINAL: self.split,
            Route.FUSED_ASSIST: self.fused,
        }
        self._worker = CpuWorker(link, self.stages, pool, self.attention, routes)
        self._worker.ready()

    def iterate(self, batch: CpuBatch) -> StepDone:
        """One iteration through the worker's own loop; Full-CPU leaves its post-layer out."""
        self._channel.send_down(batch)
        self._worker.turn()
        done = next(self._channel.up.take())
        assert isinstance(done, StepDone)
        return done

    def take_waits(self) -> list[Wait]:
        waits, self.client.waits = self.client.waits, []
        return waits
