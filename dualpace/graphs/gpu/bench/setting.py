"""The model, the pool and the clock of a benchmark of the GPU library."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from dualpace.graphs.gpu import attention, kv
from dualpace.graphs.gpu.attention import Heads, PagedRows
from dualpace.graphs.gpu.capture import Capturer
from dualpace.graphs.gpu.forward import Forward, Rows
from dualpace.graphs.rope import rope_table
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.weights import Weights, layer_shapes, make_layer, make_weights, top_shapes

VLLM_MS = {1: 4.88, 8: 5.22, 32: 6.22, 64: 7.53, 128: 10.45, 256: 17.63}
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXT = 1024
STEPS = 40
PROMPT = 2048
MAX_ROWS = 8192
POOL_BLOCKS = 1 + 256 * 70
HOST_BLOCKS = 1024
CUDA = torch.device("cuda", 0)


class Bench:
    """One model, its pool, and what was measured so far."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self.result: dict[str, object] = {}
        shape = SHAPES["llama-3.1-8b"]
        self.spec = dataclasses.replace(shape, num_layers=int(options.get("layers", 32)))
        spec = self.spec
        self.heads = Heads(spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
        weights = device_weights(spec)
        cos, sin = (t.to(CUDA) for t in rope_table(spec, 16384))
        self.forward = Forward(spec, weights, cos, sin, MAX_ROWS)
        self.pool = kv.make_pool(
            spec.num_layers, POOL_BLOCKS, self.heads.kv, self.heads.dim, torch.bfloat16, "cuda"
        )
        for layer in self.pool:
            layer.normal_()
        self.caches = list(self.pool.unbind(0))
        self.choice = attention.choose(torch.bfloat16, options.get("attention", "auto"))
        self.maker: attention.Maker = attention.make(self.choice, self.heads, torch.bfloat16, CUDA)
        self.rows = Rows.empty(spec, MAX_ROWS, torch.bfloat16, CUDA)
        self.sampled = torch.zeros(512, dtype=torch.int32, device=CUDA)
        self.capturer = Capturer(CUDA)
        self.copy_rate = 0.0

    def note(self, key: str, value: object) -> None:
        self.result[key] = value
        print(f"{key}: {value}", flush=True)

    def decode(self, bucket: int) -> attention.Decode:
        return self.maker.decode(bucket, bucket * 70)


def device_weights(spec: ModelSpec, device: torch.device = CUDA) -> Weights:
    """Random weights made on the device, scaled as a trained model's."""
    generator = torch.Generator(device).manual_seed(0)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        if name.endswith("norm"):
            return out.uniform_(0.5, 1.5, generator=generator)
        return out.normal_(0, shape[-1] ** -0.5, generator=generator)

    top = {name: make(name, shape) for name, shape in top_shapes(spec).items()}
    layers = [
        make_layer({name: make(name, shape) for name, shape in layer_shapes(spec).items()})
        for _ in range(spec.num_layers)
    ]
    return make_weights(top, layers)


def random_pages(lens: list[int], bucket: int = 0) -> tuple[PagedRows, list[list[int]]]:
    """Scattered blocks for each row, none twice."""
    counts = [-(-n // 16) for n in lens]
    ids = (torch.randperm(POOL_BLOCKS - 1)[: sum(counts)] + 1).tolist()
    starts = np.cumsum([0, *counts])
    tables = [ids[a:b] for a, b in pairwise(starts)]
    return PagedRows.of(tables, lens, bucket), tables


def timed(function: Callable[[], object], repeats: int = 10, warm_ups: int = 3) -> float:
    """Median milliseconds on the device."""
    for _ in range(warm_ups):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())
