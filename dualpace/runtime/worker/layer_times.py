"""How long one layer's parts take here, measured when a worker starts: for policies that judge by
predicted times and have no profile. A GPU's own times are `cuda.layer_times`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from statistics import median

import numpy as np
import torch

from dualpace.block import BLOCK_TOKENS
from dualpace.cpu.append import kv_append
from dualpace.graphs.attention import causal_prefill
from dualpace.graphs.executor import Stages
from dualpace.runtime.plan import Plan
from dualpace.runtime.worker.activations import sampling_rows
from dualpace.runtime.worker.attention import DecodeAttention
from dualpace.runtime.worker.kv_pools import HostPool
from dualpace.runtime.worker.progress import Times
from dualpace.runtime.worker.rows import DecodeArrays, SamplingArrays

_ROWS = (1, 16, 64, 128)
_SAMPLED_ROWS = (1, 16)  # a post-layer is as much work as several layers
_KV_TOKENS = (16, 256, 4096)
_HOST_KV_TOKENS = (16384, 65536)  # where the host pool is that large
_PROMPTS = (16, 128)
_REPEATS = 3


@torch.inference_mode()
def accelerator_times(
    plan: Plan, stages: Stages, attention: DecodeAttention, like: torch.Tensor
) -> Times:
    """Dense stages and attention of a rank of the stand-in; `like` gives the dtype. All ranks run
    the same stages, as often."""
    model = plan.model
    q_heads, kv_heads = model.num_q_heads // plan.gpu.tp, model.num_kv_heads // plan.gpu.tp
    width = q_heads * model.head_dim
    times: Times = {"linear": [], "prefill": []}
    for rows in _up_to(plan.gpu.max_batch_size, _ROWS):
        x = stages.pre_layer(torch.zeros(rows, dtype=torch.long))
        positions, out = torch.zeros(rows, dtype=torch.long), like.new_zeros(rows, width)
        times["linear"].append((rows, timed(partial(_linear, stages, x, positions, out))))
    times["post_layer"] = _post_layer_times(stages, plan.gpu.max_batch_size)
    for length in _PROMPTS:
        q = like.new_zeros(length, q_heads, model.head_dim)
        k = like.new_zeros(length, kv_heads, model.head_dim)
        prefill = timed(partial(causal_prefill, q, k, k, [length], [None]))
        times["prefill"].append((length * length, prefill))
    return times | {"decode": attention_times(attention, like, (q_heads, model.head_dim))}


@torch.inference_mode()
def attention_times(
    attention: DecodeAttention, like: torch.Tensor, heads: tuple[int, int]
) -> list[tuple[int, float]]:
    """Decode attention by KV tokens, in rows of up to 256, all in the scratch block."""
    points = []
    for tokens in _KV_TOKENS:
        decodes = _decodes(tokens, 1)
        q = like.new_zeros(len(decodes.slots), *heads)
        out = torch.empty_like(q)
        attention.begin(decodes)
        points.append((tokens, timed(partial(attention.run, 0, q, out))))
    return points


@torch.inference_mode()
def host_dense_times(plan: Plan, stages: Stages) -> Times:
    """Dense stages of a rank of the host by rows, each stage by itself. Every repeat takes another
    layer's weights, which then come from memory. All ranks run the same stages, as often."""
    model = plan.model
    width = model.num_q_heads // plan.cpu.tp * model.head_dim
    times: Times = {"host_pre": [], "host_post": []}
    for rows in _up_to(plan.cpu.max_batch_size, _ROWS):
        x, layers = stages.pre_layer(torch.zeros(rows, dtype=torch.long)), range(model.num_layers)
        positions, out = torch.zeros(rows, dtype=torch.long), x.new_zeros(rows, width)
        pre = (stages.pre_attention(layer, x, positions) for layer in cycle(layers))
        post = (stages.post_attention(layer, out, x) for layer in cycle(layers))
        times["host_pre"].append((rows, timed(partial(next, pre))))
        times["host_post"].append((rows, timed(partial(next, post))))
    return times | {"host_post_layer": _post_layer_times(stages, plan.cpu.max_batch_size)}


def _post_layer_times(stages: Stages, most: int) -> list[tuple[int, float]]:
    times = []
    for rows in _up_to(most, _SAMPLED_ROWS):
        x = stages.pre_layer(torch.zeros(rows, dtype=torch.long))
        sampling = sampling_rows(_greedy(rows))
        times.append((rows, timed(partial(stages.post_layer, x, sampling))))
    return times


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    return sorted({min(size, most) for size in sizes})


@torch.inference_mode()
def host_times(plan: Plan, attention: DecodeAttention, pool: HostPool) -> list[tuple[int, float]]:
    """K/V writes and attention of a layer by KV tokens. Every repeat reads another layer of as many
    blocks as there are, so that what is timed is memory and not a cache, nor the mapping of pages
    that nobody has touched."""
    model, num_blocks = plan.model, len(pool.blocks)
    num_layers = min(model.num_layers, _REPEATS + 1)
    largest = [t for t in _HOST_KV_TOKENS if t <= num_blocks * BLOCK_TOKENS]
    points = []
    for tokens in sorted({*_KV_TOKENS, *largest}):
        decodes = _decodes(tokens, num_blocks)
        rows, slots = len(decodes.slots), torch.from_numpy(decodes.slots)
        q = pool.blocks.new_zeros(rows, model.num_q_heads // plan.cpu.tp, model.head_dim)
        k, out = q[:, : pool.blocks.shape[3]].contiguous(), torch.empty_like(q)
        layers = cycle(range(num_layers))
        attention.begin(decodes)
        once = partial(_append_and_attend, attention, pool, layers, slots, q, k, out)
        for _ in range(num_layers):
            once()
        points.append((tokens, timed(once)))
    return points


def _append_and_attend(
    attention: DecodeAttention,
    pool: HostPool,
    layers: Iterator[int],
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
) -> None:
    layer = next(layers)
    kv_append(k, k, pool.layers[layer], slots)
    attention.run(layer, q, out)


def _decodes(tokens: int, num_blocks: int) -> DecodeArrays:
    """Rows of up to 256 tokens, that many in all, over blocks 0 ... in turn; K and V go to 0."""
    context = min(tokens, 256)
    rows = tokens // context
    blocks = np.arange(rows * context // BLOCK_TOKENS) % num_blocks
    return DecodeArrays(
        blocks.astype(np.int32).reshape(rows, -1),
        np.full(rows, context, np.int32),
        np.zeros(rows, np.int64),
    )


def _linear(
    stages: Stages, x: torch.Tensor, positions: torch.Tensor, attention: torch.Tensor
) -> None:
    stages.pre_attention(0, x, positions)
    stages.post_attention(0, attention, x)


def timed(run: Callable[[], object]) -> float:
    """Median seconds; the first run warms up."""
    seconds = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def _greedy(rows: int) -> SamplingArrays:
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    return SamplingArrays(zeros, np.zeros(rows, np.int32), ones, zeros)
