"""Benchmark of paged attention on both pool layouts, beside a plain read of the very pool.

Attention and reading take turns, in one chain of kernels as in serving, so that what else the
machine does meanwhile counts for both. Each time another layer and block table is taken, so that
little is left in the cache. This file knows nothing about serving.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualpace.cpu.attention import PagedDecoder, block_shape, plan_decode
from dualpace.cpu.bench_peers import sdpa, vllm, why_no_vllm
from dualpace.cpu.ceilings import Reader, best_seconds, in_turns
from dualpace.cpu.chain import Chain, Step
from dualpace.cpu.decode_kernel import NUM_CHUNKS
from dualpace.cpu.isa import Level

BF16 = torch.bfloat16
GB = 1e9
_PARTS, _LEAST_PART = 8, 1 << 21  # of a pool, and bytes, that are read between two of attention


@dataclass(frozen=True)
class Heads:
    """The heads of a model."""

    q: int
    kv: int
    dim: int

    @property
    def block_bytes(self) -> int:
        """Of K and V of 16 tokens, all heads, one layer."""
        return 2 * self.kv * 16 * self.dim * 2


class AttentionCase:
    """One batch over a pool in `memory` (bytes of bf16 numbers), through several block tables."""

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
        pool = self.memory.view(BF16).view(*shape, 2, heads.kv, 16, heads.dim)
        self.pool = [pool[:, i] if block_major else pool[i] for i in range(layers)]
        self.q = torch.randn(rows, heads.q, heads.dim).to(BF16)
        self.out = torch.empty_like(self.q)
        self.scale = heads.dim**-0.5
        kind = block_shape(heads.dim, heads.q // heads.kv, BF16, level)
        self.tables, self.decoders = [], []
        for _ in range(max(1, min(8, num_blocks // (rows * blocks)))):
            chosen = torch.randperm(num_blocks)[: rows * blocks]
            self.tables.append(chosen.to(torch.int32).view(rows, blocks))
            self.decoders.append(PagedDecoder(heads.q, heads.kv, heads.dim, BF16, kind))
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
    """bf16 of either sign between 2^-7 and 1, the same few million again and again; `memory`."""
    pattern = torch.empty(1 << 22, dtype=torch.int16).random_(0x3C00, 0x3F80)
    pattern[::3] |= -0x8000
    for piece in torch.split(memory.view(torch.int16), len(pattern)):
        piece.copy_(pattern[: len(piece)])
    return memory


class Chained:
    """A case's attention as a worker runs it: one of a chain of kernels, behind others that have
    filled the caches. Here those read the pool, a part each, so that what is read and what attends
    are timed in one run.
    """

    def __init__(self, case: AttentionCase, threads: int) -> None:
        size = max(case.memory.numel() // _PARTS, min(_LEAST_PART, case.memory.numel()))
        self.readers = [Reader(part, threads) for part in torch.split(case.memory, size)]
        blocks = [case.filled(turn) for turn in range(len(self.readers))]
        steps = []
        for reader, block in zip(self.readers, blocks, strict=True):
            steps += [reader.step(), Step(case.decoders[0].function, block, NUM_CHUNKS)]
        self._chain = Chain(steps, threads, timed=True)
        self.times: list[float] = []  # of attention
        self.rates: list[float] = []  # of reading, bytes/s

    def run(self) -> None:
        self._chain.run()
        seconds = self._chain.seconds()
        self.times += seconds[1::2].tolist()
        self.rates += [r.bytes / t for r, t in zip(self.readers, seconds[::2], strict=True)]


def attention_table(
    heads: Heads,
    memory: Tensor,
    batches: tuple[tuple[int, int], ...],
    threads: int,
    options: Any,
) -> list[dict[str, Any]]:
    """Records of all (rows, context); options: repeats, level, and chunks and heads of the plan."""
    missing = why_no_vllm()
    print(f"\nattention, {heads.q}/{heads.kv} heads of {heads.dim}, bf16; medians")
    print(missing or "vLLM's CPU attention on K and V in a cache of its own")
    print(
        "rows context layout           MB       ms   GB/s  pool read  ratio  called ms"
        "   SDPA ms  vLLM ms    error"
    )
    records = []
    for rows, context in batches:
        for block_major in (False, True):
            case = AttentionCase(heads, memory, rows, context, block_major, options.level)
            case.plan(threads, chunks_per_thread=options.chunks, heads_per_item=options.heads)
            chained = Chained(case, threads)
            chained.run()
            chained.times, chained.rates = [], []
            calls = in_turns({"chained": chained.run, "called": case.run}, options.repeats)
            seconds, error = median(chained.times), case.error()
            rate, read = case.bytes / seconds, median(chained.rates)
            peers = {} if block_major else _peers(case, options.level, missing is None)
            record = {
                "rows": rows,
                "context": context,
                "layout": "block-major" if block_major else "per-layer",
                "mb": round(case.bytes / 1e6, 1),
                "ms": round(seconds * 1e3, 4),
                "gb_s": round(rate / GB, 1),
                "pool_read_gb_s": round(read / GB, 1),
                "of_read": round(rate / read, 3),
                "called_ms": round(median(calls["called"]) * 1e3, 4),
                "peers_ms": peers,
                "right": error < 2**-7,
            }
            records.append(record)
            print(
                f"{rows:4} {context:7} {record['layout']:12} {record['mb']:8.1f} "
                f"{record['ms']:8.3f} {record['gb_s']:6.1f} {record['pool_read_gb_s']:10.1f} "
                f"{record['of_read']:6.0%} {record['called_ms']:10.3f} {peers.get('sdpa', ''):>9} "
                f"{peers.get('vllm', ''):>8} {error:8.1e}",
                flush=True,
            )
    return records


def _peers(case: AttentionCase, level: Level, has_vllm: bool) -> dict[str, float]:
    """Milliseconds of others' attention on the K and V of the case's last run."""
    runs = {"sdpa": sdpa(case)} | ({"vllm": vllm(case, level)} if has_vllm else {})
    return {name: round(best_seconds(run, 2) * 1e3, 3) for name, run in runs.items()}
