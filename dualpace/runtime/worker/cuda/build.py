"""Makes the accelerator worker of a CUDA device. Says what it is doing, and how long it took."""

# mypy: allow-untyped-calls

from collections.abc import Iterable
from pathlib import Path

import torch

from dualpace.graphs.gpu import attention
from dualpace.graphs.gpu.host_memory import HostMemory
from dualpace.graphs.gpu.stream_words import StreamWords
from dualpace.graphs.load import load_weights
from dualpace.graphs.source import resolve_source
from dualpace.graphs.weights import DTYPES, Weights
from dualpace.runtime.messages import GpuBatch
from dualpace.runtime.order import OrderLeader
from dualpace.runtime.plan import Plan
from dualpace.runtime.wiring import kv_layout
from dualpace.runtime.worker.accelerator import AcceleratorWorker, Rounds
from dualpace.runtime.worker.cuda import lockstep, warm_up
from dualpace.runtime.worker.cuda import model as device_model
from dualpace.runtime.worker.cuda.assists import AssistGraphs, DeviceAssists
from dualpace.runtime.worker.cuda.compiles import Compiles
from dualpace.runtime.worker.cuda.events import Lately
from dualpace.runtime.worker.cuda.layer_times import device_times, exchange_times
from dualpace.runtime.worker.cuda.lockstep import HostLink, PairedRounds
from dualpace.runtime.worker.cuda.rounds import DeviceRounds
from dualpace.runtime.worker.cuda.transfers import (
    DeviceTransfers,
    RegisteredPool,
    WriteOut,
    make_checks,
)
from dualpace.runtime.worker.exchange import Exchange
from dualpace.runtime.worker.kv_pools import AcceleratorPool
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.progress import Progress
from dualpace.runtime.worker.ranks import (
    Ranks,
    attention_columns,
    exchange_of,
    host_parts,
    join,
    make_worker,
    order_of,
)

# Stage tasks queued behind the one on the device, by the way assists are served: between them, so
# that an assist waits for two at most, or beside them, so that launching them never blocks.
_AHEAD = {"boundary": 1, "stream": 16}
_LATELY_S = 0.25  # beside rounds assists are looked out for this long after the last one


def build_device(
    plan: Plan, link: Link, progress: Progress, assists_reachable: bool
) -> AcceleratorWorker:
    """The worker of `--role gpu` on the device of its rank. ConfigError for what the driver
    refuses.
    """
    device = torch.device("cuda", link.rank)
    torch.cuda.set_device(device)
    with progress.phase("ranks", "meeting the other ranks"):
        ranks = join(plan, "gpu", link)
    compiles = Compiles()
    dtype = DTYPES[plan.model.dtype]
    weights = _weights(plan, ranks, device, progress)
    choice = attention.choose(dtype)
    buckets = device_model.buckets_up_to(plan.gpu.max_batch_size)
    ahead = _AHEAD[plan.assist.mode] if assists_reachable else None
    boundaries = assists_reachable and plan.assist.mode == "boundary"
    lately = None if boundaries else Lately(_LATELY_S)
    spec = resolve_source(plan.model.source).spec
    beside = plan.cpu.max_batch_size if link.lockstep is not None else 0  # host rows of a round
    context, limit = plan.model.max_context, plan.gpu.max_batched_tokens + beside
    with progress.phase("products", "choosing products"):
        forward = device_model.make_forward(spec, weights, context, limit, None, ranks)
        cores = (*plan.gpu.cores, *plan.cpu.cores)
        device_model.choose_products(forward, buckets, _folder(plan), cores, progress.say)
        maker = device_model.choose_attention(
            forward, choice, buckets[-1], _folder(plan), cores, progress.say
        )
    with progress.phase("pools", "making the GPU's KV pool"):
        layout = kv_layout(plan, plan.gpu.tp)
        pool = AcceleratorPool(layout, plan.kv.gpu_pool_blocks, dtype, device).blocks
        progress.bytes["gpu_kv"] = pool.nbytes
    hosts = _host_pools(plan, link, ranks, progress)
    with progress.phase("graphs", f"capturing decode steps; attention: {choice.reason}"):
        model = device_model.make_model(
            forward,
            pool,
            limit,
            buckets,
            maker,
            boundaries,
            progress.steps("capturing decode steps"),
            max_sampled=buckets[-1] + beside,
        )
    checks = make_checks(pool, hosts) if plan.kv.check_moves else None
    write_out = WriteOut(hosts, checks) if plan.kv.host_blocks else None
    transfers = DeviceTransfers(pool, hosts, checks)
    rounds = DeviceRounds(model, transfers, write_out, compiles, boundaries, ahead, lately)
    with progress.phase("warm_up", "warming up"):
        _warm_up(rounds, transfers, warm_up.batches(buckets, write_out is not None, plan))
    assists = None
    if assists_reachable:
        with progress.phase("assists", "capturing assists"):
            largest = plan.cpu.max_batch_size
            own = device_model.make_forward(spec, weights, 1, largest, forward.choices, ranks)
            graphs = AssistGraphs(own, largest, progress.steps("capturing assists"))
            order = order_of(link)
            assists = DeviceAssists(
                link,
                graphs,
                dtype,
                plan.assist.mode == "stream",
                attention_columns(plan, ranks.shard),
                order if isinstance(order, OrderLeader) else None,
                lately,
            )
    if plan.times_layers and link.lockstep is None:
        with progress.phase("layer_times", "timing a layer"):
            lane = lockstep.Lane(model.rows, rounds.inputs, {})
            progress.layer_times = device_times(model, lane)
    served: Rounds = rounds
    if link.lockstep is not None:
        served = _paired(plan, exchange_of(plan, link, link.rank), rounds, progress)
    torch.cuda.synchronize()
    progress.bytes["gpu_allocated"] = torch.cuda.memory_allocated()
    return make_worker(link, served, transfers, assists)


@torch.inference_mode()
def _paired(
    plan: Plan, exchange: Exchange, rounds: DeviceRounds, progress: Progress
) -> PairedRounds:
    """The rounds with two lanes for host rows, warm, and their layer timed."""
    model = rounds.model
    with progress.phase("lanes", "capturing dense work beside host rows"):
        link = HostLink(exchange, StreamWords(), len(model.caches))
        report = progress.steps("capturing dense work beside host rows")
        lanes = lockstep.make_lanes(model, rounds.inputs, plan.cpu.max_batch_size, report)
        paired = PairedRounds(rounds, *lanes, link)
    with progress.phase("layer_times", "timing a layer"):
        progress.layer_times = device_times(model, lanes[0]) | exchange_times(model, link)
    with progress.phase("warm_up_lanes", "warming up"):
        # Ranks share the answers: none has ended before all have asked for the last time, since
        # what follows adds up.
        exchange.buffer.answer_all(True)
        for batch in warm_up.pairs(model.buckets, plan.cpu.max_batch_size):
            _run(paired, batch)
        exchange.buffer.answer_all(False)
    return paired


def _run(rounds: DeviceRounds | PairedRounds, batch: GpuBatch) -> None:
    for _ in rounds.tasks(batch):
        pass
    torch.cuda.synchronize()
    rounds.take_finished()


def _folder(plan: Plan) -> Path | None:
    return Path(plan.compile.cache_dir) / "gpu" if plan.compile.cache_dir else None


def _weights(plan: Plan, ranks: Ranks, device: torch.device, progress: Progress) -> Weights:
    source = resolve_source(plan.model.source)
    with progress.phase("weights", f"loading {plan.model.name}"):
        dtype, seed = DTYPES[plan.model.dtype], plan.model.seed
        weights = load_weights(source, dtype, seed, ranks.shard, device)
        progress.bytes["weights"] = weights.num_bytes()
    return weights


def _host_pools(plan: Plan, link: Link, ranks: Ranks, progress: Progress) -> list[RegisteredPool]:
    """The parts of the host pool that hold this rank's heads."""
    link.await_host_pool(progress)
    with progress.phase("host_memory", "registering host memory"):
        report = progress.steps("registering MiB of host memory")
        return [
            RegisteredPool(
                part.pool.blocks,
                HostMemory(
                    part.pool.blocks,
                    part.pool.blocks[0].nbytes,
                    progress=lambda done, total: report(done >> 20, total >> 20),
                ),
                part.common,
            )
            for part in host_parts(plan, link, ranks.shard)
        ]


@torch.inference_mode()
def _warm_up(rounds: DeviceRounds, transfers: DeviceTransfers, batches: Iterable[GpuBatch]) -> None:
    for batch in batches:
        _run(rounds, batch)
        _run(rounds, batch)
        ended = transfers.take_ended()
        if transfers.checks is not None:
            transfers.checks.forget(ended)  # all of them moved block 0, at the same time
