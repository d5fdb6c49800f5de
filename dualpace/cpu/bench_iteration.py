"""Benchmark of a whole decode iteration of Llama-3.1-8B's shape, split by stage, beside a roofline.

The layers' weights and KV rotate through a few sets that together exceed the last-level cache, so
that memory is read as if there were as many as the model has. On tiles all layers are one chain of
kernels, as in serving; elsewhere every stage is a few calls over oneDNN. The roofline of a stage is
the larger of its bytes over the read bandwidth and its operations over the tile unit's rate, where
there is one. What Python and the starting of kernels cost is the time of the same calls for a model
of the same depth and next to no width. This file knows nothing about engines.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dualpace.cpu import packed
from dualpace.cpu.append import kv_append
from dualpace.cpu.attention import PagedDecoder, plan_decode
from dualpace.cpu.dense_stage import PostAttention, Rooms, norm_rows
from dualpace.cpu.gemm import TileLinear, Unit
from dualpace.cpu.layers import Layers
from dualpace.cpu.memory import huge_empty
from dualpace.cpu.qkv import Places, PreAttention

BF16 = torch.bfloat16
STAGES = ("plan", "pre", "attention", "post", "final")  # K and V are appended in pre
NAMES = (*STAGES, "(fixed)")


@dataclass(frozen=True)
class Model:
    """Sizes of the model, and how many sets of weights and KV stand for its layers."""

    hidden: int = 4096
    intermediate: int = 14336
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    layers: int = 32
    sets: int = 4

    @property
    def weights(self) -> dict[str, int]:
        """Numbers of a layer, and of the head, by stage."""
        attn, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "pre": self.hidden * (attn + 2 * kv),
            "post": self.hidden * (attn + 3 * self.intermediate),
            "final": self.hidden * self.vocab,
        }

    @property
    def hollow(self) -> "Model":
        """As many layers of the same kernels with nothing to do."""
        group = self.q_heads // self.kv_heads
        return Model(32, 32, group, 1, self.head_dim, 32, self.layers, 1)


TINY = Model(576, 1536, 9, 3, 64, 2048, layers=4, sets=2)


def random_matrix(rows: int, width: int) -> Tensor:
    """bf16 of either sign, about 1 / sqrt(width), the same few million again and again."""
    pattern = (torch.rand(1 << 22) * 2 - 1).mul_(width**-0.5).to(BF16)
    whole = huge_empty(rows * width * 2).view(BF16)
    for piece in torch.split(whole, len(pattern)):
        piece.copy_(pattern[: len(piece)])
    return whole.view(rows, width)


class Iteration:
    """One batch with its layers, pool and block tables. rooms: of layers on tiles."""

    def __init__(
        self, model: Model, rows: int, context: int, layers: list[Any], rooms: Rooms | None
    ) -> None:
        m, self.rows = model, rows
        self.model, self.layers = model, layers
        blocks = -(-context // 16)
        one = 2 * m.kv_heads * 16 * m.head_dim
        pool = random_matrix(rows * blocks * m.sets, one)
        pool = pool.view(rows * blocks, m.sets, 2, m.kv_heads, 16, m.head_dim)
        self.pools = [pool[:, i] for i in range(m.sets)]
        self.tables = torch.randperm(rows * blocks).int().view(rows, blocks)
        self.positions = torch.full((rows,), context - 1)
        self.decoder = PagedDecoder(m.q_heads, m.kv_heads, m.head_dim, BF16)
        self.lens = np.full(rows, context, np.int32)
        angles = self.positions[:, None, None] * 5e5 ** -(torch.arange(0, 1, 2 / m.head_dim))
        angles = angles.flatten(1)
        slots = self.tables[:, -1].long() * 16 + (context - 1) % 16
        self.places = Places(angles.cos(), angles.sin(), slots)
        self.norm = torch.ones(m.hidden, dtype=BF16)
        self.spent, self._started = dict.fromkeys(STAGES, 0.0), 0.0
        self.chain = None
        if rooms is not None:
            turns = [i % m.sets for i in range(m.layers)]
            self.chain = Layers(
                [layers[i][0] for i in turns],
                [layers[i][1] for i in turns],
                [self.pools[i] for i in turns],
                self.decoder,
                rooms,
                timed=True,
            )

    def run(self, x: Tensor) -> Tensor:
        m, self._started = self.model, time.perf_counter()
        plan = plan_decode(self.lens, m.kv_heads, torch.get_num_threads())
        self.decoder.begin(plan, self.tables)
        normal = torch.empty_like(x)
        self._lap("plan")
        x = self._by_calls(x) if self.chain is None else self._by_chain(self.chain, x)
        norm_rows(x, self.norm, 1e-5, normal)
        tokens: Tensor = self.layers[0][2](normal).argmax(1)
        self._lap("final")
        return tokens

    def _by_chain(self, chain: Layers, x: Tensor) -> Tensor:
        chain.begin(self.rows, self.places, self.model.head_dim**-0.5)
        x = chain.run(x)
        pre, attention, post = np.split(chain.seconds.sum(0), [2, 3])
        for stage, seconds in (("pre", pre), ("attention", attention), ("post", post)):
            self.spent[stage] += float(seconds.sum())
        self._started = time.perf_counter()
        return x

    def _by_calls(self, x: Tensor) -> Tensor:
        m = self.model
        out = torch.empty(self.rows, m.q_heads, m.head_dim, dtype=BF16)
        for i in range(m.layers):
            pre, post, _ = self.layers[i % m.sets]
            q = pre(x, self.places, self.pools[i % m.sets])
            self._lap("pre")
            self.decoder.run(q, self.pools[i % m.sets], m.head_dim**-0.5, out)
            self._lap("attention")
            x = post(out.view(self.rows, -1), x)
            self._lap("post")
        return x

    def _lap(self, stage: str) -> None:
        then, self._started = self._started, time.perf_counter()
        self.spent[stage] += self._started - then


def make_layers(model: Model, unit: Unit | None, rooms: Rooms) -> list[Any]:
    """(pre, post, head) of each set, by `unit` or oneDNN; one head for all."""
    m = model
    attn, kv = m.q_heads * m.head_dim, m.kv_heads * m.head_dim
    norm = torch.ones(m.hidden, dtype=BF16)

    def linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
        if unit is not None:
            return TileLinear(weight, unit=unit, scratch=rooms.tiles)
        handle, outputs = packed.pack(weight), weight.shape[0]
        return lambda x: packed.packed_linear(x, handle, outputs)

    def pre() -> Callable[[Tensor, Places, Tensor], Tensor]:
        heads = (m.q_heads, m.kv_heads, m.head_dim)
        weight = random_matrix(attn + 2 * kv, m.hidden)
        if unit is not None:
            return PreAttention(norm, weight, heads, 1e-5, rooms, unit)
        qkv = linear(weight)

        def run(x: Tensor, places: Places, cache: Tensor) -> Tensor:
            normal = torch.empty_like(x)
            norm_rows(x, norm, 1e-5, normal)
            product = qkv(normal).view(len(x), -1, m.head_dim)
            q, k, v = torch.split(product, [m.q_heads, m.kv_heads, m.kv_heads], dim=1)
            kv_append(_rope(k, places), v, cache, places.slots)
            return _rope(q, places)

        return run

    def post() -> Callable[[Tensor, Tensor], Tensor]:
        o = random_matrix(m.hidden, attn)
        gate_up = random_matrix(2 * m.intermediate, m.hidden)
        down = random_matrix(m.hidden, m.intermediate)
        if unit is not None:
            return PostAttention(o, norm, gate_up, down, 1e-5, rooms, unit)
        first, second, third = linear(o), linear(gate_up), linear(down)

        def run(attention: Tensor, x: Tensor) -> Tensor:
            x = x + first(attention)
            normal = torch.empty_like(x)
            norm_rows(x, norm, 1e-5, normal)
            gate, up = second(normal).chunk(2, 1)
            return x + third(F.silu(gate) * up)

        return run

    head = linear(random_matrix(m.vocab, m.hidden))
    return [(pre(), post(), head) for _ in range(m.sets)]


def _rope(x: Tensor, places: Places) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = places.cos[:, None], places.sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def iteration_table(
    model: Model,
    batches: tuple[int, ...],
    context: int,
    bandwidth: float,
    rate: float | None,
    unit: Unit | None,
) -> list[dict[str, Any]]:
    """Times of decode iterations of each batch. bandwidth in bytes/s, rate in FLOP/s (None: no tile
    unit). unit: what multiplies, None: oneDNN.
    """
    rooms = None if unit is None else Rooms()
    layers = make_layers(model, unit, rooms or Rooms())
    hollow = make_layers(model.hollow, unit, rooms or Rooms())
    print(f"\ndecode iteration, {model.layers} layers, context {context}, bf16")
    print("rows       ms  tokens/s   of roofline   " + "  ".join(f"{s:>10}" for s in NAMES))
    records = []
    for rows in batches:
        seconds, spent = _fastest(Iteration(model, rows, context, layers, rooms))
        fixed, _ = _fastest(Iteration(model.hollow, rows, 1, hollow, rooms))
        ideal = _roofline(model, rows, context, bandwidth, rate)
        record = {
            "rows": rows,
            "ms": round(seconds * 1e3, 2),
            "tokens_s": round(rows / seconds, 1),
            "of_roofline": round(sum(ideal.values()) / seconds, 3),
            "fixed_ms": round(fixed * 1e3, 2),
            "stages_ms": {s: round(t * 1e3, 2) for s, t in spent.items()},
            "roofline_ms": {s: round(t * 1e3, 2) for s, t in ideal.items()},
        }
        records.append(record)
        stages = "  ".join(f"{t * 1e3:10.2f}" for t in (*spent.values(), fixed))
        print(
            f"{rows:4} {record['ms']:8.1f} {record['tokens_s']:9.1f} {record['of_roofline']:12.0%}"
            f"    {stages}",
            flush=True,
        )
    return records


def _fastest(case: Iteration) -> tuple[float, dict[str, float]]:
    """Seconds of the fastest of three runs, and of its stages."""
    x = torch.randn(case.rows, case.model.hidden).to(BF16)
    case.run(x)
    times = []
    for _ in range(3):
        case.spent = dict.fromkeys(STAGES, 0.0)
        start = time.perf_counter()
        case.run(x)
        times.append((time.perf_counter() - start, case.spent))
    return min(times, key=lambda pair: pair[0])


def _roofline(
    m: Model, rows: int, context: int, bandwidth: float, rate: float | None
) -> dict[str, float]:
    """Seconds of each stage over all layers."""
    ideal = {
        stage: max(2 * n / bandwidth, 2 * n * rows / rate if rate else 0.0)
        for stage, n in m.weights.items()
    }
    ideal["attention"] = 4 * m.kv_heads * m.head_dim * context * rows / bandwidth
    return {s: t * (1 if s == "final" else m.layers) for s, t in ideal.items()}
