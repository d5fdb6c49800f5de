"""How long one layer's parts take on a device, for policies that judge by predicted times and have
no profile. Measured when the worker starts, with the kernels that it serves with.
"""

# mypy: allow-untyped-calls

from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch

from dualpace.block import BLOCK_TOKENS
from dualpace.graphs.gpu.attention import PagedRows
from dualpace.graphs.gpu.capture import Capturer
from dualpace.graphs.gpu.forward import Rows
from dualpace.runtime.worker.cuda.lockstep import HostLink, Lane
from dualpace.runtime.worker.cuda.model import DeviceModel
from dualpace.runtime.worker.progress import Times

_CAPTURED = (1, 8, 32, 64, 128)  # buckets, and the largest one, where there are no graphs of lanes
_LARGE = (512, 1024, 2048, 4096, 8192)  # rows beyond the buckets
_KV_TOKENS = (1024, 8192, 32768, 131072)
_PROMPTS = (128, 512, 2048)
_EXCHANGED = (1, 16, 64, 256)
_LAYERS = 4  # so that weights and KV come from memory
_REPEATS = 3


@torch.inference_mode()
def device_times(model: DeviceModel, lane: Lane) -> Times:
    """Seconds by size, as `engine.predict` names them. `lane` is sub-batch 0's, or the rounds' own
    rows and inputs without graphs; then decode steps' buckets are captured for once, some layers in
    one graph. Overwrites the rows' buffers and no block of the pool.
    """
    lane.send({name: np.empty(0) for name in lane.inputs.views})  # idle: K and V go nowhere
    layers = range(min(_LAYERS, len(model.caches)))
    largest = model.buckets[-1]
    buckets = [n for n in model.buckets if lane.graphs or n in _CAPTURED or n == largest]
    large = [n for n in _LARGE if largest < n <= len(model.rows.x)]
    capturer = Capturer(model.forward.device)
    return {
        "linear": [(n, _linear(model, lane, n, layers, capturer)) for n in (*buckets, *large)],
        "post_layer": [(rows, _timed(partial(_greedy, model, rows))) for rows in buckets],
        "decode": [(t, _decode(model, t, capturer)) for t in _decode_sizes(model)],
        "prefill": [(n * n, _prefill(model, n)) for n in _PROMPTS if n <= len(model.rows.x)],
    }


@torch.inference_mode()
def exchange_times(model: DeviceModel, link: HostLink) -> Times:
    """The way of host rows' activations, by rows."""
    most = min(link.max_rows, len(model.rows.x))
    sizes = [rows for rows in _EXCHANGED if rows <= most]
    trips = [(n, _timed(partial(link.round_trip, model.rows.first(n)))) for n in sizes]
    return {"exchange": trips}


def _linear(model: DeviceModel, lane: Lane, count: int, layers: range, capturer: Capturer) -> float:
    """Post- and pre-attention of one layer."""
    rows = model.rows.first(count)
    graphs = lane.graphs_for(count)
    run = graphs.after if graphs is not None else partial(_dense, model, lane, rows)

    def all_layers() -> None:
        for layer in layers:
            run(layer)

    once: Callable[[], object] = all_layers
    if graphs is None and count <= model.buckets[-1]:
        capturer.warm_up(all_layers)
        once = capturer.capture(all_layers).replay
    return _timed(once) / len(layers)


def _dense(model: DeviceModel, lane: Lane, rows: Rows, layer: int) -> None:
    count, views = len(rows.x), lane.inputs.views
    model.forward.post_attention(layer, rows)
    positions, slots = views["positions"][:count], views["slots"][:count]
    model.forward.pre_attention(layer, rows, positions, model.caches[layer], slots)


def _greedy(model: DeviceModel, count: int) -> None:
    model.forward.greedy(model.rows.h[:count], model.sampled[:count])


def _decode_sizes(model: DeviceModel) -> list[int]:
    """Tokens that the pool and the rows of the largest bucket can hold."""
    room = (model.caches[0].shape[0] - 1) * BLOCK_TOKENS
    return [tokens for tokens in _KV_TOKENS if tokens <= room] or [room]


def _decode(model: DeviceModel, tokens: int, capturer: Capturer) -> float:
    """One layer's attention over that many tokens, in rows of about 1,024."""
    rows = min(max(tokens // 1024, 1), model.buckets[-1])
    bucket = model.bucket(rows)
    blocks = tokens // rows // BLOCK_TOKENS
    tables = [list(range(1 + row * blocks, 1 + (row + 1) * blocks)) for row in range(rows)]
    attend = model.attends[bucket]
    attend.plan(PagedRows.of(tables, [blocks * BLOCK_TOKENS] * rows, bucket))
    q = model.rows.q[:bucket]
    out = model.rows.attn[:bucket].view_as(q)

    def all_layers() -> None:
        for cache in model.caches:
            attend.run(q, cache, out)

    capturer.warm_up(all_layers)
    return _timed(capturer.capture(all_layers).replay) / len(model.caches)


def _prefill(model: DeviceModel, length: int) -> float:
    prefill, rows = model.maker.prefill(), model.rows.first(length)
    prefill.plan([length])
    attn = rows.attn.view_as(rows.q)

    def all_layers() -> None:
        for cache in model.caches:
            prefill.run(rows.q, rows.k, rows.v, attn, cache)

    return _timed(all_layers) / len(model.caches)


def _timed(run: Callable[[], object]) -> float:
    """Median seconds from the first launch's start to the end; the first run warms up."""
    seconds = []
    for _ in range(_REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(float(begin.elapsed_time(end)) / 1e3)
    return median(seconds[1:])
