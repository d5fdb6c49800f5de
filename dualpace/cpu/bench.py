"""Benchmark of the CPU kernels against ceilings and peers measured in the same run.

Correctness first, then attention on both pool layouts, the dense stage of a layer, a whole decode
iteration, and scaling over threads. Weights and KV rotate through more memory than the last-level
cache holds. Prints for people and ends with one JSON line. This file knows nothing about serving.
"""

import argparse
import json
import os
import platform
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from dualpace.cpu import topology
from dualpace.cpu.attention_case import AttentionCase, Heads, fill
from dualpace.cpu.bench_attention import attention_table
from dualpace.cpu.bench_dense import DenseCase, dense_table
from dualpace.cpu.bench_iteration import TINY, Model, iteration_table
from dualpace.cpu.bench_scaling import draw_scaling, scaling_table
from dualpace.cpu.ceilings import Reader, TileSpinner, in_turns
from dualpace.cpu.gemm import TILES, VECTORS, Unit
from dualpace.cpu.isa import Level, detect
from dualpace.cpu.memory import huge_empty, shared_empty
from dualpace.cpu.openmp import runtimes
from dualpace.options import sentences, whole_number

PARTS = ("attention", "dense", "iteration", "scaling")


@dataclass(frozen=True)
class Sizes:
    """How much is run: whole, or quick (every path, small)."""

    model: Model
    batches: tuple[tuple[int, int], ...]  # rows, context
    rows: tuple[int, ...]
    iteration: tuple[int, ...]  # rows
    scaling: tuple[int, int, int]  # rows and context of attention, rows of the dense stage
    memory: int  # bytes that KV and weights rotate through
    repeats: int


LLAMA_8B = Sizes(
    Model(),
    (
        *((1, 64), (1, 1024), (1, 16384), (8, 64), (8, 256), (8, 1024), (8, 4096)),
        *((32, 256), (32, 1024), (64, 1024), (128, 256), (128, 1024)),
    ),
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    (8, 64, 256),
    (32, 1024, 256),
    1 << 30,
    11,
)
QUICK = Sizes(TINY, ((1, 64), (8, 256), (8, 1024)), (1, 16, 64), (2, 8), (8, 1024, 64), 1 << 27, 5)


def main(arguments: list[str] | None = None) -> int:
    """Entry of scripts/bench_cpu.py. Exit code 1 if a result is wrong."""
    with sentences():
        return _main(_options(arguments))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="CPU kernels against this machine's ceilings",
        epilog="example: python scripts/bench_cpu.py --quick --only attention --threads 1",
    )
    parser.add_argument("--quick", action="store_true", help="small shapes, every path")
    parser.add_argument("--threads", type=whole_number, help="default: one a usable core")
    parser.add_argument("--isa", help=f"{', '.join(Level)}; default: the best here")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    parser.add_argument("--chunks", type=whole_number, default=16, help="attention chunks a thread")
    parser.add_argument("--heads", type=whole_number, default=1, help="KV heads walked together")
    parser.add_argument("--float32", action="store_true", help="attention on float32 K and V")
    parser.add_argument("--small-pages", action="store_true", help="KV as processes share it")
    parser.add_argument("--figure", metavar="FILE", help="plot scaling into this file")
    options = parser.parse_args(arguments)
    kv_heads = (QUICK if options.quick else LLAMA_8B).model.kv_heads
    if kv_heads % options.heads:
        parser.error(f"argument --heads: {options.heads} does not divide the {kv_heads} KV heads")
    return options


def _main(options: argparse.Namespace) -> int:
    sizes = QUICK if options.quick else LLAMA_8B
    cores = topology.usable_cores()
    threads = options.threads or len(cores)
    os.sched_setaffinity(0, cores[:threads])
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    isa = detect(options.isa)
    options.level, options.repeats = isa.level, sizes.repeats
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
    size = sizes.memory * (2 if options.float32 else 1)  # as many tokens
    memory = fill((shared_empty if options.small_pages else huge_empty)(size))
    unit = {Level.AMX: TILES, Level.AVX512_BF16: VECTORS}.get(isa.level)
    report |= _run(sizes, options, threads, memory, unit)
    wrong = [r for r in report.get("attention", []) + report.get("dense", []) if not r["right"]]
    report["wrong"] = len(wrong)
    print(json.dumps(report))
    return 1 if wrong else 0


def _run(
    sizes: Sizes, options: Any, threads: int, memory: torch.Tensor, unit: Unit | None
) -> dict[str, Any]:
    """The chosen parts, and the ceilings that the machine shows before them."""
    m, report = sizes.model, dict[str, Any]()
    reader, spinner = Reader(memory, threads), TileSpinner(threads) if unit == TILES else None
    ceilings = {"read": reader.run} | ({"peak": spinner.run} if spinner else {})
    times = {name: median(t) for name, t in in_turns(ceilings, sizes.repeats).items()}
    bandwidth = reader.bytes / times["read"]
    rate = spinner.flops / times["peak"] if spinner else None
    report["read_gb_s"] = round(bandwidth / 1e9, 1)
    print(f"{'read':12} {report['read_gb_s']} GB/s, {threads} threads")
    if rate:
        report["amx_tflop_s"] = round(rate / 1e12, 2)
        print(f"{'AMX':12} {report['amx_tflop_s']} TFLOP/s from registers")
    heads = Heads(m.q_heads, m.kv_heads, m.head_dim)
    if "attention" in options.only:
        kept = replace(heads, dtype=torch.float32) if options.float32 else heads
        report["attention"] = attention_table(kept, memory, sizes.batches, threads, options)
    if {"dense", "scaling"} & set(options.only):
        attn = m.q_heads * m.head_dim
        dense = DenseCase(m.hidden, m.intermediate, attn, sizes.memory, unit)
        if "dense" in options.only:
            report["dense"] = dense_table(dense, sizes.rows, threads, bandwidth, sizes.repeats)
        if "scaling" in options.only:
            rows, context, dense_rows = sizes.scaling
            case = AttentionCase(heads, memory, rows, context, True, options.level)
            records = scaling_table(case, dense, dense_rows, threads, sizes.repeats)
            report["scaling"] = records
            if options.figure:
                draw_scaling(records, options.figure)
        del dense
    if "iteration" in options.only:
        report["iteration"] = iteration_table(m, sizes.iteration, 1024, bandwidth, rate, unit)
    return report


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
