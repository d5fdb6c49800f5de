"""This process's CPU rank: the very parts that serve, with a clock on each assist's wait."""

import subprocess
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualpace.graphs.sampling import Drawn
from dualpace.graphs.weights import DTYPES
from dualpace.runtime.assist import AssistKind
from dualpace.runtime.messages import CpuBatch, StepDone
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.team import Team
from dualpace.runtime.routing import Route
from dualpace.runtime.worker.attention import DecodeAttention
from dualpace.runtime.worker.build import worker_stages
from dualpace.runtime.worker.cpu_worker import CpuWorker
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.progress import Progress
from dualpace.runtime.worker.ranks import host_shard, join
from dualpace.runtime.worker.routes import (
    AssistClient,
    FullCpu,
    FusedAssist,
    RouteRun,
    SplitFinal,
    assist_client,
)
from dualpace.runtime.worker.rows import SamplingArrays


def say(text: str) -> None:
    """Into this process's log, whose last line the sweep shows."""
    print(text, flush=True)


Wait = tuple[AssistKind, int, float]  # kind, rows, seconds


class TimedClient(AssistClient):
    """Another client, of one rank or of several, and how long each assist kept it waiting."""

    def __init__(self, client: AssistClient) -> None:
        self._client = client
        self.shared = client.shared
        self.waits: list[Wait] = []

    def write(self, x: Tensor, sampling: SamplingArrays | None = None) -> None:
        self._client.write(x, sampling)

    def ask(self, kind: AssistKind, layer: int, num_rows: int) -> None:
        started = time.perf_counter()
        self._client.ask(kind, layer, num_rows)
        self.waits.append((kind, num_rows, time.perf_counter() - started))

    def release(self) -> None:
        self._client.release()

    def drawn(self, sampling: SamplingArrays) -> Drawn:
        return self._client.drawn(sampling)


class LayersOnly(FullCpu):
    """Full-CPU without its post-layer: what the layers of a decode iteration take."""

    def draw(self, x: Tensor, sampling: SamplingArrays) -> Drawn:
        return Drawn(torch.zeros(len(x), dtype=torch.int32))


class RankLink(Link):
    """Of a CPU rank that measures: each says for itself what it found, and hears of lost ranks."""

    others: Sequence[subprocess.Popen[bytes]] = ()  # that this one has started

    def is_alive(self) -> bool:
        return super().is_alive() and all(other.poll() is None for other in self.others)


class HostWorker:
    """`iterate` runs a whole decode iteration; the parts are there to be timed by themselves."""

    def __init__(self, plan: Plan, link: Link) -> None:
        """Waits for the other ranks. What is said is the first one's."""
        self._channel = link.channel
        dtype, ranks = DTYPES[plan.model.dtype], join(plan, "cpu", link)
        self.team = Team(ranks.collective)
        self.num_layers = plan.model.num_layers
        self.num_q_heads = plan.model.num_q_heads // plan.cpu.tp
        width = self.num_q_heads * plan.model.head_dim
        progress = Progress(say if self.team.is_first else lambda text: None)
        self.stages = worker_stages(plan, "cpu", progress, ranks)
        pool = host_shard(plan, link, link.rank)
        self.attention = DecodeAttention(pool.layers, self.num_q_heads, plan.cpu.threads)
        self.attention.warm_up()
        self.client = TimedClient(assist_client(link, dtype, ranks.collective))
        self.full = FullCpu(self.stages, width)
        self.split = SplitFinal(self.stages, width, self.client)
        self.fused = FusedAssist(self.client, self.num_layers)
        routes: Mapping[Route, RouteRun] = {
            Route.FULL_CPU: LayersOnly(self.stages, width),
            Route.SPLIT_FINAL: self.split,
            Route.FUSED_ASSIST: self.fused,
        }
        max_rows = plan.cpu.max_batch_size
        self._worker = CpuWorker(link, self.stages, pool, self.attention, routes, max_rows)
        self._worker.ready()

    def iterate(self, batch: CpuBatch) -> StepDone:
        """One iteration through the worker's own loop; Full-CPU leaves its post-layer out. All
        ranks begin together."""
        self.team.meet()
        self._channel.send_down(batch)
        self._worker.turn()
        done = next(self._channel.up.take())
        assert isinstance(done, StepDone)
        return done

    def take_waits(self) -> list[Wait]:
        """Since the last time, each as long as the slowest rank's."""
        waits, self.client.waits = self.client.waits, []
        seconds = self.team.slowest([seconds for _, _, seconds in waits])
        return [(kind, rows, s) for (kind, rows, _), s in zip(waits, seconds, strict=True)]
