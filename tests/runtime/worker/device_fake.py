"""The device's worker without a device: the stages and plain attention for its kernels, calls for
its graphs, and streams that do at once what they are given, which is one of the orders that they
allow."""

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dualpace.graphs.attention import causal_prefill, gather_context
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.gpu import stream_copies
from dualpace.graphs.gpu.attention import PagedRows
from dualpace.graphs.gpu.forward import Rows
from dualpace.graphs.gpu.triton_attention import SdpaPrefill
from dualpace.graphs.load import load_weights
from dualpace.graphs.sampling import SamplingRows
from dualpace.graphs.shard import WHOLE
from dualpace.graphs.source import resolve_source
from dualpace.runtime.plan import Plan
from dualpace.runtime.wiring import kv_layout
from dualpace.runtime.worker import build
from dualpace.runtime.worker.accelerator import AcceleratorWorker
from dualpace.runtime.worker.cuda import (
    assists,
    layer_times,
    lockstep,
    model,
    rounds,
    transfers,
)
from dualpace.runtime.worker.cuda import build as device_build
from dualpace.runtime.worker.exchange import Exchange
from dualpace.runtime.worker.kv_pools import AcceleratorPool, HostPool
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.progress import Progress
from tests.runtime.worker import rig

PATIENCE_S = 60.0


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, event: object) -> None: ...


class Event:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: object) -> float:
        return 0.0


class Capturer:
    def __init__(self, device: torch.device) -> None: ...

    def warm_up(self, function: Callable[[], Any]) -> None: ...

    def capture(self, function: Callable[[], Any], keep: bool = False) -> SimpleNamespace:
        return SimpleNamespace(replay=function)


class Words:
    """The stream's words, where a wait really waits for the other worker."""

    def write(self, stream: object, address: int, value: int) -> None:
        ctypes.c_int64.from_address(address).value = value

    def wait(self, stream: object, address: int, value: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while ctypes.c_int64.from_address(address).value < value:
            assert time.monotonic() < deadline, "nobody answers"
            time.sleep(0.0005)


class Driver:
    """Copies at once."""

    def __init__(self, _: str) -> None:
        def copy(target: int, source: int, count: int, stream: int) -> int:
            ctypes.memmove(target, source, count)
            return 0

        self.cuMemcpyDtoHAsync_v2 = self.cuMemcpyHtoDAsync_v2 = copy


class Forward:
    """What the device's forward computes, by the stages, which have the norms; so `h` is x."""

    def __init__(self, plan: Plan) -> None:
        source = resolve_source(plan.model.source)
        self.spec, self.dtype, self.device = source.spec, torch.float32, torch.device("cpu")
        self.shard = WHOLE
        self.weights = load_weights(source, torch.float32, plan.model.seed)
        self._stages = GraphCache().build(source.spec, self.weights, max_context=512)

    def embed(
        self, rows: Rows, ids: torch.Tensor, source: torch.Tensor, sampled: torch.Tensor
    ) -> None:
        late = sampled[source.clamp(min=0).long()].long()
        self._leave(rows, self._stages.pre_layer(torch.where(source >= 0, late, ids)))

    def pre_attention(
        self,
        layer: int,
        rows: Rows,
        positions: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        emit: bool = True,
    ) -> None:
        q, k, v = self._stages.pre_attention(layer, rows.x, positions)
        for mine, made in ((rows.q, q), (rows.k, k), (rows.v, v)):
            mine.copy_(made)
        kept = slots >= 0
        places = slots[kept]
        for i, made in enumerate((k, v)):
            cache[places // 16, i, :, places % 16] = made[kept]

    def post_attention(self, layer: int, rows: Rows) -> None:
        self._leave(rows, self._stages.post_attention(layer, rows.attn, rows.x))

    def normed(self, rows: Rows, weight: torch.Tensor) -> None:
        rows.h.copy_(rows.x)

    def greedy(self, h: torch.Tensor, tokens: torch.Tensor) -> None:
        zeros, ones = torch.zeros(len(h)), torch.ones(len(h))
        self.sample(h, SamplingRows.of(zeros, zeros.int(), ones, zeros), tokens)

    def sample(
        self, h: torch.Tensor, how: SamplingRows, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        drawn = self._stages.draw(h, how)
        tokens.copy_(drawn.tokens)
        return drawn.logprobs

    def _leave(self, rows: Rows, x: torch.Tensor) -> None:
        rows.x.copy_(x)
        rows.h.copy_(x)


class Decode:
    """Attention row by row; padding rows too, as a device's would write them."""

    def plan(self, rows: PagedRows) -> None:
        self._rows = rows

    def run(self, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        for row, length in enumerate(self._rows.context_lens().tolist()):
            first, end = self._rows.indptr[row : row + 2].tolist()
            k, v = gather_context(cache, self._rows.indices[first:end].long(), length)
            earlier = (k[:-1], v[:-1])
            out[row] = causal_prefill(q[row : row + 1], k[-1:], v[-1:], [1], [earlier])[0]


class Maker:
    def decode(self, bucket: int, max_blocks: int) -> Decode:
        return Decode()

    def prefill(self) -> SdpaPrefill:
        return SdpaPrefill()


def write_out(
    k: torch.Tensor, v: torch.Tensor, host: torch.Tensor, layer: int, blocks: torch.Tensor
) -> None:
    places = torch.arange(len(k))
    for i, part in enumerate((k, v)):
        host[blocks[places // 16].long(), layer, i, :, places % 16] = part


def device_rig(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a `Rig` has the device's rounds, and a CPU worker that polls."""
    for name, fake in (
        ("Stream", Stream),
        ("Event", Event),
        ("stream", contextlib.nullcontext),
        ("current_stream", Stream),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    for module in (model, lockstep, layer_times, assists):
        monkeypatch.setattr(module, "Capturer", Capturer)
    for module in (lockstep, assists):
        monkeypatch.setattr(module, "HostMemory", lambda *_: None)
    monkeypatch.setattr(transfers, "host_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(device_build, "StreamWords", Words)
    monkeypatch.setattr(stream_copies, "CDLL", Driver)
    monkeypatch.setattr(layer_times, "_timed", _once)
    monkeypatch.setattr(transfers.kv, "write_out", write_out)
    monkeypatch.setattr(build, "build_accelerator", _build)
    build_cpu = build.build_cpu

    def on_device(plan: Plan, link: Link, progress: Progress) -> build.Worker:
        gpu = dataclasses.replace(plan.gpu, device="cuda")
        return build_cpu(dataclasses.replace(plan, gpu=gpu), link, progress)

    monkeypatch.setattr(build, "build_cpu", on_device)
    assert rig.build is build


def _once(run: Callable[[], object]) -> float:
    run()
    return 1.0


def _build(plan: Plan, link: Link, progress: Progress, _: object) -> AcceleratorWorker:
    limit = plan.gpu.max_batched_tokens + plan.cpu.max_batch_size
    layout = kv_layout(plan)
    cpu = torch.device("cpu")
    pool = AcceleratorPool(layout, plan.kv.gpu_pool_blocks, torch.float32, cpu).blocks
    host = HostPool(link.host_pool, layout, plan.kv.host_pool_blocks, torch.float32)
    memory: Any = SimpleNamespace(chunk_pieces=plan.kv.host_pool_blocks)
    registered = transfers.RegisteredPool(host.blocks, memory)
    forward: Any = Forward(plan)
    maker: Any = Maker()
    paired = link.lockstep is not None
    made = model.make_model(
        forward, pool, limit, (4, 8), maker, not paired, _ignore, max_sampled=32
    )
    checks = transfers.make_checks(pool, [registered]) if plan.kv.check_moves else None
    moves = transfers.DeviceTransfers(pool, [registered], checks)
    compiles: Any = SimpleNamespace(ready=lambda: None, after_ready=0)
    write_out = transfers.WriteOut([registered], checks)
    main = rounds.DeviceRounds(made, moves, write_out, compiles, not paired, None if paired else 1)
    if link.lockstep is None:
        if plan.times_layers:
            lane = lockstep.Lane(made.rows, main.inputs, {})
            progress.layer_times = layer_times.device_times(made, lane)
        graphs = assists.AssistGraphs(forward, plan.cpu.max_batch_size, _ignore)
        served = assists.DeviceAssists(link, graphs, torch.float32, own_stream=False)
        return AcceleratorWorker(link, main, moves, served)
    exchange = Exchange(link.lockstep, plan.model.head_dim, torch.float32)
    lanes = device_build._paired(plan, exchange, main, progress)
    assert set(progress.layer_times) == {"linear", "post_layer", "decode", "prefill", "exchange"}
    return AcceleratorWorker(link, lanes, moves, None)


def _ignore(done: int, total: int) -> None: ...
