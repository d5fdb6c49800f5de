"""How long one layer's parts take here, measured when a worker starts: for policies that predict
whether CPU attention hides behind the accelerator's work. The stand-in's times; a GPU has none yet.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch

from dualpace.graphs.attention import causal_prefill
from dualpace.graphs.executor import Stages
from dualpace.runtime.plan import BLOCK_TOKENS, Plan
from dualpace.runtime.worker.activations import sampling_rows
from dualpace.runtime.worker.attention import DecodeAttention
from dualpace.runtime.worker.rows import DecodeArrays, SamplingArrays

Times = dict[str, list[tuple[int, float]]]

_ROWS = (1, 8, 32, 128)
_KV_TOKENS = (16, 256, 4096)
_PROMPTS = (16, 128)
_REPEATS = 3


@torch.inference_mode()
def accelerator_times(
    plan: Plan, stages: Stages, attention: DecodeAttention, like: torch.Tensor
) -> Times:
    """Dense stages and attention of the stand-in; `like` gives the dtype."""
    model = plan.model
    width = model.num_q_heads * model.head_dim
    times: Times = {"linear": [], "post_layer": [], "prefill": []}
    for rows in (r for r in _ROWS if r <= plan.gpu.max_batch_size):
        x = stages.pre_layer(torch.zeros(rows, dtype=torch.long))
        positions, out = torch.zeros(rows, dtype=torch.long), like.new_zeros(rows, width)
        sampling = sampling_rows(_greedy(rows))

        times["linear"].append((rows, timed(partial(_linear, stages, x, positions, out))))
        times["post_layer"].append((rows, timed(partial(stages.post_layer, x, sampling))))
    for length in _PROMPTS:
        q = like.new_zeros(length, model.num_q_heads, model.head_dim)
        k = like.new_zeros(length, model.num_kv_heads, model.head_dim)
        prefill = timed(partial(causal_prefill, q, k, k, [length], [None]))
        times["prefill"].append((length * length, prefill))
    return times | {"decode": attention_times(plan, attention, like)}


@torch.inference_mode()
def attention_times(
    plan: Plan, attention: DecodeAttention, like: torch.Tensor
) -> list[tuple[int, float]]:
    """Decode attention by KV tokens, in rows of up to 256, all in the scratch block."""
    model, points = plan.model, []
    for tokens in _KV_TOKENS:
        context = min(tokens, 256)
        rows = tokens // context
        decodes = DecodeArrays(
            np.zeros((rows, context // BLOCK_TOKENS), np.int32),
            np.full(rows, context, np.int32),
            np.zeros(rows, np.int64),
        )
        q = like.new_zeros(rows, model.num_q_heads, model.head_dim)
        out = torch.empty_like(q)
        attention.begin(decodes)
        points.append((tokens, timed(partial(attention.run, 0, q, out))))
    return points


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
