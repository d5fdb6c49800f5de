"""A batch of paged attention over a large pool, for benchmarks: ours and others run the same."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualpace.cpu.attention import PagedDecoder, block_shape, plan_decode
from dualpace.cpu.isa import Level


@dataclass(frozen=True)
class Heads:
    """The heads of a model, and what their K and V are kept in: bf16 or float32."""

    q: int
    kv: int
    dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def block_bytes(self) -> int:
        """Of K and V of 16 tokens, all heads, one layer."""
        return 2 * self.kv * 16 * self.dim * self.dtype.itemsize


class AttentionCase:
    """One batch over a pool in `memory`, bytes left by `fill`, through several block tables."""

    def __init__(
        self, heads: Heads, memory: Tensor, rows: int, context: int, block_major: bool, level: Level
    ) -> None:
        self.heads, self.rows, self.context = heads, rows, context
        blocks = -(-context // 16)
        self.bytes = rows * blocks * heads.block_bytes
        layers = max(2, min(16, -(-memory.numel() // self.bytes)))
        num_blocks = memory.numel() // layers // heads.block_bytes
        assert num_blocks >= rows * blocks
        shape = (num_blocks, layers) if block_major else (layers, num_blocks)
        self.memory = memory[: num_blocks * layers * heads.block_bytes]
        pool = self.memory.view(heads.dtype).view(*shape, 2, heads.kv, 16, heads.dim)
        self.pool = [pool[:, i] if block_major else pool[i] for i in range(layers)]
        self.q = torch.randn(rows, heads.q, heads.dim).to(heads.dtype)
        self.out = torch.empty_like(self.q)
        self.scale = heads.dim**-0.5
        kind = block_shape(heads.dim, heads.q // heads.kv, heads.dtype, level)
        self.tables, self.decoders = [], []
        for _ in range(max(1, min(8, num_blocks // (rows * blocks)))):
            chosen = torch.randperm(num_blocks)[: rows * blocks]
            self.tables.append(chosen.to(torch.int32).view(rows, blocks))
            self.decoders.append(PagedDecoder(heads.q, heads.kv, heads.dim, heads.dtype, kind))
        self.turn = 0

    def plan(self, threads: int, **choices: int) -> None:
        """Divide the work; choices are plan_decode's."""
        lens = np.full(self.rows, self.context, np.int32)
        plan = plan_decode(lens, self.heads.kv, threads, **choices)
        for decoder, table in zip(self.decoders, self.tables, strict=True):
            decoder.begin(plan, table)

    def run(self) -> None:
        self.turn += 1
        layer = self.pool[self.turn % len(self.pool)]
        self.decoders[self.turn % len(self.decoders)].run(self.q, layer, self.scale, self.out)

    def gathered(self, dtype: torch.dtype, row: slice) -> tuple[Tensor, Tensor]:
        """K and V of the last run as [rows, kv_heads, context, d]."""
        table = self.tables[self.turn % len(self.tables)][row].long()
        picked = self.pool[self.turn % len(self.pool)][table].to(dtype)  # [r, b, 2, H, 16, d]
        both = picked.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[..., : self.context, :]
        return both[0], both[1]

    def filled(self, turn: int) -> NDArray[np.int64]:
        """An argument block of the kernel for what the `turn`-th run would do."""
        decoder, layer = self.decoders[turn % len(self.decoders)], self.pool[turn % len(self.pool)]
        return decoder.fill(self.q, layer, self.scale, self.out).copy()

    def error(self) -> float:
        """Largest difference of the last run's first two rows from float64."""
        k, v = self.gathered(torch.float64, slice(0, 2))
        q = self.q[:2].double().reshape(k.shape[0], k.shape[1], -1, k.shape[3])
        exact = (q @ k.mT * self.scale).softmax(-1) @ v
        return float((self.out[:2].double() - exact.flatten(1, 2)).abs().max())


def fill(memory: Tensor) -> Tensor:
    """Numbers between 2^-7 and 1 and their negatives, in bf16 as in float32: a few million that
    repeat. Returns `memory`.
    """
    pattern = torch.empty(1 << 22, dtype=torch.int16).random_(0x3C00, 0x3F80)
    pattern[::3] |= -0x8000
    for piece in torch.split(memory.view(torch.int16), len(pattern)):
        piece.copy_(pattern[: len(piece)])
    return memory
