"""Makes a worker of a plan: weights, stages, pools, warm kernels. Says what it is doing, and how
long each part took.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dualpace.errors import ConfigError
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.executor import Stages
from dualpace.graphs.load import load_weights
from dualpace.graphs.source import resolve_source
from dualpace.graphs.weights import DTYPES
from dualpace.runtime.plan import Plan
from dualpace.runtime.routing import Route
from dualpace.runtime.wiring import kv_layout
from dualpace.runtime.worker.accelerator import AcceleratorWorker
from dualpace.runtime.worker.assist_service import AssistService
from dualpace.runtime.worker.attention import AcceleratorAttention, DecodeAttention
from dualpace.runtime.worker.copies import CopyEngine
from dualpace.runtime.worker.cpu_worker import CpuWorker
from dualpace.runtime.worker.kv_pools import AcceleratorPool, HostPool
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.routes import AssistClient, FullCpu, FusedAssist, RouteRun, SplitFinal
from dualpace.runtime.worker.transfers import Staging, Transfers


class Worker(Protocol):
    def turn(self) -> None:
        """Waits for work, does some. Raises LifelineClosedError."""


@dataclass(slots=True)
class Progress:
    """Reports phases through `say` and keeps their seconds, for the `Ready` message."""

    say: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        self.say(text)
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 3)


def build_accelerator(
    plan: Plan, link: Link, progress: Progress, copy_engine: Callable[[int], CopyEngine]
) -> AcceleratorWorker:
    """The worker of `--role gpu`. Raises ConfigError for a device that it cannot drive."""
    if plan.gpu.device != "cpu":
        raise ConfigError(
            f"gpu.device={plan.gpu.device} is not served by this version; set gpu.device=cpu."
        )
    device = torch.device(plan.gpu.device)
    stages = _stages(plan, plan.gpu.device, plan.compile.backend_gpu, progress)
    layout, dtype = kv_layout(plan), DTYPES[plan.model.dtype]
    with progress.phase("pools", "making the accelerator's KV pool"):
        hbm = AcceleratorPool(layout, plan.kv.gpu_blocks, dtype, device)
        host = HostPool(link.host_pool, layout, plan.kv.host_blocks, dtype)
        progress.bytes["gpu_kv"] = hbm.blocks.nbytes
    with progress.phase("attention", "preparing attention"):
        attention = AcceleratorAttention(hbm, plan.model.num_q_heads, plan.gpu.threads)
        attention.warm_up()
    copies = copy_engine(link.doorbell)
    staging = Staging(host, plan.gpu.max_batched_tokens, copies)
    progress.bytes["staging"] = staging.nbytes
    assists = AssistService(link, stages, dtype, device) if assists_reachable(plan) else None
    return AcceleratorWorker(
        link,
        stages,
        attention,
        Transfers(hbm, host, copies),
        staging,
        assists,
        plan.model.num_layers,
        device,
    )


def build_cpu(plan: Plan, link: Link, progress: Progress) -> CpuWorker:
    """The worker of `--role cpu`."""
    stages = _stages(plan, "cpu", plan.compile.backend_cpu, progress)
    layout, dtype = kv_layout(plan), DTYPES[plan.model.dtype]
    host = HostPool(link.host_pool, layout, plan.kv.host_blocks, dtype)
    with progress.phase("attention", "preparing attention"):
        attention = DecodeAttention(host.layers, plan.model.num_q_heads, plan.cpu.threads)
        attention.warm_up()
    width = plan.model.num_q_heads * plan.model.head_dim
    client = AssistClient(link, dtype)
    routes: dict[Route, RouteRun] = {
        Route.FULL_CPU: FullCpu(stages, width),
        Route.SPLIT_FINAL: SplitFinal(stages, width, client),
        Route.FUSED_ASSIST: FusedAssist(client, plan.model.num_layers),
    }
    return CpuWorker(link, stages, host, attention, routes)


def assists_reachable(plan: Plan) -> bool:
    """Whether any CPU batch that can be formed is above F (paper 4.2, the end)."""
    return plan.cpu.max_batch_size > plan.assist.post_layer_limit


def _stages(plan: Plan, device: str, backend: str, progress: Progress) -> Stages:
    source = resolve_source(plan.model.source)
    with progress.phase("weights", f"loading {plan.model.name}"):
        weights = load_weights(source, DTYPES[plan.model.dtype], plan.model.seed)
        progress.bytes["weights"] = weights.num_bytes()
    with progress.phase("stages", f"building stages ({backend})"):
        return GraphCache().build(
            source.spec,
            weights,
            device=device,
            backend=backend,
            buckets=plan.compile.buckets or (),
            max_context=plan.model.max_context,
        )
