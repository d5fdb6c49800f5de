"""Makes a worker of a plan: weights, stages, pools, warm kernels. Says what it is doing, and how
long each part took.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from dualpace.graphs.buckets import by_stage
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.executor import Stages
from dualpace.graphs.load import load_weights
from dualpace.graphs.shard import Shard
from dualpace.graphs.source import resolve_source
from dualpace.graphs.weights import DTYPES
from dualpace.runtime.order import OrderLeader
from dualpace.runtime.plan import Plan
from dualpace.runtime.routing import Route
from dualpace.runtime.wiring import kv_layout
from dualpace.runtime.worker.accelerator import AcceleratorWorker
from dualpace.runtime.worker.assist_service import AssistService
from dualpace.runtime.worker.attention import AcceleratorAttention, DecodeAttention
from dualpace.runtime.worker.copies import CopyEngine
from dualpace.runtime.worker.cpu_worker import CpuWorker
from dualpace.runtime.worker.kv_pools import AcceleratorPool, HostPool
from dualpace.runtime.worker.layer_times import accelerator_times, host_dense_times, host_times
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.lockstep import AttentionWorker, HeadGroup, LockstepRounds
from dualpace.runtime.worker.move_checks import MoveChecks
from dualpace.runtime.worker.progress import Progress
from dualpace.runtime.worker.ranks import (
    ALONE,
    Ranks,
    attention_columns,
    common_heads,
    exchange_of,
    host_parts,
    host_shard,
    join,
    make_worker,
    order_of,
)
from dualpace.runtime.worker.routes import (
    FullCpu,
    FusedAssist,
    RouteRun,
    SplitFinal,
    assist_client,
)
from dualpace.runtime.worker.stand_in import StandInRounds
from dualpace.runtime.worker.transfers import Staging, Transfers


class Worker(Protocol):
    def ready(self) -> None:
        """All is built and warm: whatever is compiled from now on is a defect."""

    def turn(self) -> None:
        """Waits for work, does some. Raises LifelineClosedError."""


def build_accelerator(
    plan: Plan, link: Link, progress: Progress, copy_engine: Callable[[int], CopyEngine]
) -> AcceleratorWorker:
    """The worker of `--role gpu`: a GPU's, or the stand-in's with copies of `copy_engine`."""
    if plan.gpu.device == "cuda":
        from dualpace.runtime.worker.cuda.build import build_device  # needs Triton and a GPU

        return build_device(plan, link, progress, assists_reachable(plan))
    device = torch.device(plan.gpu.device)
    ranks = join(plan, "gpu", link)
    stages = worker_stages(plan, "gpu", progress, ranks)
    layout, dtype = kv_layout(plan, plan.gpu.tp), DTYPES[plan.model.dtype]
    num_q_heads = plan.model.num_q_heads // plan.gpu.tp
    with progress.phase("pools", "making the accelerator's KV pool"):
        hbm = AcceleratorPool(layout, plan.kv.gpu_pool_blocks, dtype, device)
        hosts = host_parts(plan, link, ranks.shard)
        progress.bytes["gpu_kv"] = hbm.blocks.nbytes
    with progress.phase("attention", "preparing attention"):
        attention = AcceleratorAttention(hbm, num_q_heads, plan.gpu.threads)
        attention.warm_up()
    copies = copy_engine(link.doorbell)
    checks = None
    if plan.kv.check_moves:
        checks = MoveChecks(hbm.blocks, [(host.common.own, host.blocks) for host in hosts])
    staging = Staging(hbm, hosts, plan.gpu.max_batched_tokens, copies, checks)
    progress.bytes["staging"] = staging.nbytes
    transfers = Transfers(hbm, hosts, copies, checks)
    rounds = StandInRounds(stages, attention, transfers, staging, plan.model.num_layers, device)
    if plan.times_layers:
        with progress.phase("layer_times", "timing a layer"):
            decode = DecodeAttention(hbm.layers, num_q_heads, plan.gpu.threads)
            progress.layer_times = accelerator_times(plan, stages, decode, hbm.blocks)
    if link.lockstep is None:
        assists = _assists(plan, link, stages, ranks.shard)
        return make_worker(link, rounds, transfers, assists)
    exchange = exchange_of(plan, link, link.rank)
    mixed = LockstepRounds(rounds, stages, link, exchange, plan.model.num_layers)
    return make_worker(link, mixed, transfers, None)


def _assists(plan: Plan, link: Link, stages: Stages, shard: Shard) -> AssistService | None:
    if not assists_reachable(plan):
        return None
    order = order_of(link)
    return AssistService(
        link,
        stages,
        DTYPES[plan.model.dtype],
        torch.device(plan.gpu.device),
        attention_columns(plan, shard),
        order if isinstance(order, OrderLeader) else None,
    )


def build_cpu(plan: Plan, link: Link, progress: Progress, ranks: Ranks | None = None) -> Worker:
    """The worker of `--role cpu`. `ranks`: the others, where they have met already."""
    if link.lockstep is not None:
        return _attention_worker(plan, link, progress)
    ranks = ranks or join(plan, "cpu", link)
    stages = worker_stages(plan, "cpu", progress, ranks)
    host, attention = _host_attention(plan, link, progress)
    if plan.times_layers:
        link.await_host_pool(progress)  # taking its memory keeps memory busy
        with progress.phase("layer_times", "timing a layer"):
            dense, attending = host_dense_times(plan, stages), host_times(plan, attention, host)
            progress.layer_times = {**dense, "host": attending}
    width = plan.model.num_q_heads // plan.cpu.tp * plan.model.head_dim
    client = assist_client(link, DTYPES[plan.model.dtype], ranks.collective)
    routes: dict[Route, RouteRun] = {
        Route.FULL_CPU: FullCpu(stages, width),
        Route.SPLIT_FINAL: SplitFinal(stages, width, client),
        Route.FUSED_ASSIST: FusedAssist(client, plan.model.num_layers),
    }
    return CpuWorker(link, stages, host, attention, routes, plan.cpu.max_batch_size)


def _attention_worker(plan: Plan, link: Link, progress: Progress) -> AttentionWorker:
    """It attends as the accelerator's rounds ask, and needs no weights."""
    host, attention = _host_attention(plan, link, progress)
    with progress.phase("layer_times", "timing a layer"):
        progress.layer_times = {"host": host_times(plan, attention, host)}
    groups = [
        HeadGroup(host, exchange, common, plan.cpu.threads)
        for exchange, common in common_heads(plan, link)
    ]
    return AttentionWorker(link, groups, plan.model.num_layers, plan.gpu.device == "cpu")


def _host_attention(plan: Plan, link: Link, progress: Progress) -> tuple[HostPool, DecodeAttention]:
    """This rank's part of the host pool, and attention over it, warm."""
    host = host_shard(plan, link, link.rank)
    num_q_heads = plan.model.num_q_heads // plan.cpu.tp
    with progress.phase("attention", "preparing attention"):
        attention = DecodeAttention(host.layers, num_q_heads, plan.cpu.threads)
        attention.warm_up()
    return host, attention


def assists_reachable(plan: Plan) -> bool:
    """Whether any CPU batch that can be formed is above F (paper 4.2, the end); where host rows run
    in lockstep there is none.
    """
    return not plan.policy.lockstep and plan.cpu.max_batch_size > plan.assist.post_layer_limit


def worker_stages(plan: Plan, role: str, progress: Progress, ranks: Ranks = ALONE) -> Stages:
    """The executables of this worker's stages. Under a tiered start what has to be compiled is
    compiled by a process of the lowest priority, which ends with this one.
    """
    part, settings = (plan.gpu if role == "gpu" else plan.cpu), plan.compile
    backends = settings.candidates_gpu if role == "gpu" else settings.candidates_cpu
    buckets = settings.buckets_gpu if role == "gpu" else settings.buckets_cpu
    cores = part.rank_cores[ranks.shard.rank] if part.rank_cores else ()
    source = resolve_source(plan.model.source)
    with progress.phase("weights", f"loading {plan.model.name}"):
        weights = load_weights(source, DTYPES[plan.model.dtype], plan.model.seed, ranks.shard)
        progress.bytes["weights"] = weights.num_bytes()
    with progress.phase("stages", "preparing stages"):
        return GraphCache().build(
            source.spec,
            weights,
            device=plan.gpu.device if role == "gpu" else "cpu",
            backend=backends,
            buckets=by_stage(buckets.layers, buckets.final),
            max_context=plan.model.max_context,
            shard=ranks.shard,
            collective=ranks.collective,
            cache_dir=settings.cache_dir,
            report=progress.steps("compiling and timing stages"),
            # A process of one core does as well itself.
            processes=len(cores) if len(cores) > 1 else 0,
            start=settings.start,
        )
