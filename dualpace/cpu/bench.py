"""Benchmark of the CPU kernels against ceilings and peers measured in the same run.

Correctness first, then attention on both pool layouts, then the dense stage of a layer. Weights and
KV rotate through more memory than the last-level cache holds. Prints for people and ends with one
JSON line. This file knows nothing about serving.
"""

import argparse
import itertools
import json
import mmap
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dualpace.cpu import packed, topology
from dualpace.cpu.attention import PagedDecoder, block_shape, plan_decode
from dualpace.cpu.bench_iteration import TINY, Model, iteration_table
from dualpace.cpu.ceilings import best_seconds, read_bandwidth, tile_rate
from dualpace.cpu.gemm import Epilogue, TileLinear
from dualpace.cpu.isa import Level, detect
from dualpace.cpu.memory import Scratch, huge_empty
from dualpace.cpu.openmp import runtimes

BF16 = torch.bfloat16
GB = 1e9


@dataclass(frozen=True)
class Sizes:
    """How much is run: whole, or quick (every path, small)."""

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    batches: tuple[tuple[int, int], ...]  # rows, context
    rows: tuple[int, ...]
    memory: int  # bytes that KV and weights rotate through
    repeats: int


LLAMA_8B = Sizes(
    4096,
    14336,
    32,
    8,
    128,
    (
        *((1, 64), (1, 1024), (1, 16384), (8, 64), (8, 256), (8, 1024), (8, 4096)),
        *((32, 64), (32, 256), (32, 1024), (32, 4096), (64, 1024), (128, 256), (128, 1024)),
    ),
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    1 << 30,
    15,
)
QUICK = Sizes(576, 1536, 9, 3, 64, ((1, 64), (8, 256), (8, 1024)), (1, 16, 64), 1 << 27, 7)


def main(arguments: list[str] | None = None) -> int:
    """Entry of scripts/bench_cpu.py. Exit code 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description="CPU kernels against this machine's ceilings")
    parser.add_argument("--quick", action="store_true", help="small shapes, every path")
    parser.add_argument("--threads", type=int, help="default: one a usable core")
    parser.add_argument("--isa", help="instruction level to use instead of the best")
    parser.add_argument("--only", choices=("attention", "dense"), help="one part alone")
    parser.add_argument("--chunks", type=int, help="attention chunks a thread")
    parser.add_argument("--heads", type=int, help="KV heads walked together")
    parser.add_argument("--iteration", action="store_true", help="a decode iteration by stages")
    parser.add_argument("--scaling", metavar="FILE", help="plot attention over thread counts")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else LLAMA_8B
    cores = topology.usable_cores()
    threads = options.threads or len(cores)
    os.sched_setaffinity(0, cores[:threads])
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    isa = detect(options.isa)
    options.level = isa.level
    report: dict[str, Any] = {
        "cpu": _cpu_name(),
        "isa": isa.level,
        "reason": isa.reason,
        "threads": threads,
        "huge_pages": topology.huge_pages(),
        "openmp": runtimes(),
    }
    for name, value in report.items():
        print(f"{name:12} {value}")
    options.tile_rate = tile_rate(threads) if isa.has(Level.AMX) else None
    bandwidth = read_bandwidth(huge_empty(sizes.memory).fill_(1), threads)
    report["read_gb_s"] = round(bandwidth / GB, 1)
    print(f"{'read':12} {report['read_gb_s']} GB/s, {threads} threads, huge pages")
    if options.tile_rate:
        report["amx_tflop_s"] = round(options.tile_rate / 1e12, 2)
        print(f"{'AMX':12} {report['amx_tflop_s']} TFLOP/s from registers")
    if options.only != "dense":
        report["attention"] = attention_table(sizes, threads, options)
    if options.only != "attention":
        report["dense"] = dense_table(sizes, threads, bandwidth, isa.has(Level.AMX))
    if options.iteration:
        model, batches = (TINY, (2, 8)) if options.quick else (Model(), (8, 64, 256))
        table = iteration_table(model, batches, 1024, bandwidth, options.tile_rate)
        report["iteration"] = table
    if options.scaling:
        report["scaling"] = scaling(sizes, threads, isa.level)
        draw_scaling(report["scaling"], options.scaling)
    wrong = [r for r in report.get("attention", []) + report.get("dense", []) if not r["right"]]
    report["wrong"] = len(wrong)
    print(json.dumps(report))
    return 1 if wrong else 0


class AttentionCase:
    """One batch over a pool that is larger than the cache, read through several block tables."""

    def __init__(
        self,
        sizes: Sizes,
        rows: int,
        context: int,
        block_major: bool,
        threads: int,
        options: Any,
        empty: Callable[[int], Tensor] = huge_empty,
    ) -> None:
        s, self.rows, self.context = sizes, rows, context
        blocks = -(-context // 16)
        one = 2 * s.kv_heads * 16 * s.head_dim * 2
        self.bytes = rows * blocks * one
        layers = max(2, min(16, -(-s.memory // self.bytes)))
        num_blocks = max(rows * blocks, s.memory // layers // one)
        shape = (num_blocks, layers) if block_major else (layers, num_blocks)
        self.memory = _filled(empty(num_blocks * layers * one))
        pool = self.memory.view(*shape, 2, s.kv_heads, 16, s.head_dim)
        self.pool = [pool[:, i] if block_major else pool[i] for i in range(layers)]
        self.q = torch.randn(rows, s.q_heads, s.head_dim).to(BF16)
        self.out = torch.empty_like(self.q)
        self.scale = s.head_dim**-0.5
        heads = s.q_heads, s.kv_heads
        kind = block_shape(s.head_dim, s.q_heads // s.kv_heads, BF16, options.level)
        self.tables, self.decoders = [], []
        for _ in range(max(1, min(8, num_blocks // (rows * blocks)))):
            chosen = torch.randperm(num_blocks)[: rows * blocks]
            self.tables.append(chosen.to(torch.int32).view(rows, blocks))
            self.decoders.append(PagedDecoder(*heads, s.head_dim, BF16, kind))
        self.turn = 0
        self.plan(threads, options.chunks, options.heads)

    def plan(self, threads: int, chunks: int | None, heads: int | None) -> None:
        """Divide the work anew: threads, chunks a thread, KV heads walked together (None: as the
        plan chooses).
        """
        lens = np.full(self.rows, self.context, np.int32)
        plan = plan_decode(lens, self.pool[0].shape[2], threads, chunks, heads)
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

    def error(self) -> float:
        """Largest difference of the last run's first two rows from float64."""
        k, v = self.gathered(torch.float64, slice(0, 2))
        q = self.q[:2].double().reshape(k.shape[0], k.shape[1], -1, k.shape[3])
        exact = (q @ k.mT * self.scale).softmax(-1) @ v
        return float((self.out[:2].double() - exact.flatten(1, 2)).abs().max())


def shared_empty(num_bytes: int) -> Tensor:
    """Zeroed memory that processes could share, as the engine's host pool is: in pages of 4 KiB
    where the kernel keeps huge ones from shared memory.
    """
    file = os.memfd_create("bench")
    os.ftruncate(file, num_bytes)
    area = mmap.mmap(file, num_bytes)
    os.close(file)
    return torch.frombuffer(area, dtype=torch.uint8)


def _filled(memory: Tensor) -> Tensor:
    """bf16 between 2^-7 and 1, the same few million again and again."""
    pool = memory.view(torch.int16)
    pattern = torch.empty(1 << 22, dtype=torch.int16).random_(0x3C00, 0x3F80)
    for piece in torch.split(pool, len(pattern)):
        piece.copy_(pattern[: len(piece)])
    return pool.view(BF16)


def attention_table(sizes: Sizes, threads: int, options: Any) -> list[dict[str, Any]]:
    print(f"\nattention, {sizes.q_heads}/{sizes.kv_heads} heads of {sizes.head_dim}, bf16")
    print("rows context layout           MB       ms   GB/s  pool read  ratio   SDPA ms    error")
    records = []
    for rows, context in sizes.batches:
        for block_major in (False, True):
            case = AttentionCase(sizes, rows, context, block_major, threads, options)
            seconds = best_seconds(case.run, sizes.repeats * len(case.pool))
            rate, error = case.bytes / seconds, case.error()
            # Memory is not alike everywhere: the ceiling is that of the very pool.
            read = read_bandwidth(case.memory, threads)
            record = {
                "rows": rows,
                "context": context,
                "layout": "block-major" if block_major else "per-layer",
                "mb": round(case.bytes / 1e6, 1),
                "ms": round(seconds * 1e3, 4),
                "gb_s": round(rate / GB, 1),
                "pool_read_gb_s": round(read / GB, 1),
                "of_read": round(rate / read, 3),
                "sdpa_ms": None if block_major else round(_sdpa(case) * 1e3, 2),
                "right": error < 2**-7,
            }
            records.append(record)
            peer = "" if block_major else f"{record['sdpa_ms']:9.2f}"
            print(
                f"{rows:4} {context:7} {record['layout']:12} {record['mb']:8.1f} "
                f"{record['ms']:8.3f} {record['gb_s']:6.1f} {record['pool_read_gb_s']:10.1f} "
                f"{record['of_read']:6.0%} {peer:9} "
                f"{error:8.1e}",
                flush=True,
            )
    return records


def _sdpa(case: AttentionCase) -> float:
    """Seconds of torch's attention on K and V that are gathered already."""
    k, v = case.gathered(BF16, slice(None))
    k, v, q = k.contiguous(), v.contiguous(), case.q.unsqueeze(2)

    def run() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=case.scale, enable_gqa=True)

    return best_seconds(run, 3)


Layer = Callable[[Tensor, Tensor], Tensor]


def dense_table(sizes: Sizes, threads: int, bandwidth: float, amx: bool) -> list[dict[str, Any]]:
    """O, gate and up, and down of one layer, fused as each implementation can; norms left out."""
    h, i, a = sizes.hidden, sizes.intermediate, sizes.q_heads * sizes.head_dim
    weight_bytes = 2 * (h * a + 3 * h * i)
    sets = max(2, -(-sizes.memory // weight_bytes))
    weights = [
        [torch.randn(o, n).mul_(n**-0.5).to(BF16) for o, n in ((h, a), (2 * i, h), (h, i))]
        for _ in range(sets)
    ]
    candidates: dict[str, list[Layer]] = {"onednn": [_onednn_layer(w) for w in weights]}
    if amx:
        scratch = Scratch()
        candidates["amx"] = [_tile_layer(w, scratch) for w in weights]
    print(f"\ndense after attention, hidden {h}, intermediate {i}, {sets} sets of weights, bf16")
    print("rows candidate       ms  TFLOP/s  weights GB/s  of read    error")
    records = []
    for rows in sizes.rows:
        x, residual = torch.randn(rows, a).to(BF16), torch.randn(rows, h).to(BF16)
        exact = _dense_reference(x, residual, weights[0]) if rows <= 64 else None
        for name, layers in candidates.items():
            turns = itertools.cycle(layers)
            seconds = best_seconds(partial(_next_layer, turns, x, residual), sizes.repeats)
            error = 0.0
            if exact is not None:
                result = layers[0](x, residual).double()
                error = float((result - exact).norm() / exact.norm())
            flops = rows * weight_bytes  # two a weight of two bytes
            record = {
                "rows": rows,
                "candidate": name,
                "ms": round(seconds * 1e3, 3),
                "tflop_s": round(flops / seconds / 1e12, 3),
                "gb_s": round(weight_bytes / seconds / GB, 1),
                "of_read": round(weight_bytes / seconds / bandwidth, 3),
                "right": error < 0.01,
            }
            records.append(record)
            print(
                f"{rows:4} {name:10} {record['ms']:9.3f} {record['tflop_s']:8.3f} "
                f"{record['gb_s']:13.1f} {record['of_read']:8.0%} {error:8.1e}",
                flush=True,
            )
    return records


def _next_layer(turns: Iterator[Layer], x: Tensor, residual: Tensor) -> Tensor:
    return next(turns)(x, residual)


def _onednn_layer(weights: list[Tensor]) -> Layer:
    o, gate_up, down = (packed.pack(w) for w in weights)
    sizes = [w.shape[0] for w in weights]

    def run(x: Tensor, residual: Tensor) -> Tensor:
        x = packed.packed_linear(x, o, sizes[0]) + residual
        gate, up = packed.packed_linear(x, gate_up, sizes[1]).chunk(2, 1)
        return packed.packed_linear(F.silu(gate) * up, down, sizes[2]) + x

    return run


def _tile_layer(weights: list[Tensor], scratch: Scratch) -> Layer:
    o, gate_up, down = (
        TileLinear(w, e, scratch=scratch)
        for w, e in zip(weights, (Epilogue.ADD, Epilogue.SILU_MUL, Epilogue.ADD), strict=True)
    )

    def run(x: Tensor, residual: Tensor) -> Tensor:
        x = o(x, residual)
        return down(gate_up(x), x)

    return run


def _dense_reference(x: Tensor, residual: Tensor, weights: list[Tensor]) -> Tensor:
    o, gate_up, down = (w.double() for w in weights)
    y = x.double() @ o.T + residual.double()
    gate, up = (y @ gate_up.T).chunk(2, 1)
    return (F.silu(gate) * up) @ down.T + y


def scaling(sizes: Sizes, most: int, level: Level) -> list[dict[str, Any]]:
    """Attention, and plain reading of its pool, over thread counts."""
    rows, context = max(sizes.batches, key=lambda batch: min(batch[0] * batch[1], 32768))
    options = argparse.Namespace(chunks=None, heads=None, level=level)
    case = AttentionCase(sizes, rows, context, True, most, options)
    records = []
    for n in [n for n in (1, 2, 4, 8, 16, 32, 64) if n < most] + [most]:
        torch.set_num_threads(n)
        case.plan(n, None, None)
        rate = case.bytes / best_seconds(case.run, sizes.repeats)
        read = read_bandwidth(case.memory, n)
        records.append(
            {"threads": n, "read_gb_s": round(read / GB, 1), "gb_s": round(rate / GB, 1)}
        )
        print(f"{n:3} threads: read {read / GB:6.1f} GB/s, attention {rate / GB:6.1f} GB/s")
    torch.set_num_threads(most)
    return records


def draw_scaling(records: list[dict[str, Any]], path: str) -> None:
    """The records of `scaling` as a figure in the file `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = [r["threads"] for r in records]
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for key, label in (("read_gb_s", "read"), ("gb_s", "paged attention")):
        axes.plot(counts, [r[key] for r in records], marker="o", label=label)
    axes.set(xlabel="threads", ylabel="GB/s", xscale="log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
