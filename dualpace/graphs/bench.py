"""Benchmarks of the stage graphs: what dispatch costs, what padding wastes, how long starts take.

`python scripts/bench_graphs.py --help`; prints tables and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from dualpace.graphs.buckets import FEW, LADDER, covers, rule_of_thumb

# A decode step and the most rows of it, for rows in a trace's decode rounds.
STEP_S, MAX_ROWS, MAX_TOKENS = 0.03, 256, 8192


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["dispatch", "stages", "start"])
    parser.add_argument("--trace", type=Path, action="append", default=[], help="Azure CSV file")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bf16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--candidates", default="eager,packed,inductor,inductor-packed")
    parser.add_argument("--cache-dir", type=Path, help="keep the graphs of `stages` here")
    options = parser.parse_args(arguments)
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "padding": padding,
        "dispatch": dispatch,
        "stages": stages,
        "start": start,
    }
    chosen = [*options.parts, *(["padding"] if options.trace else [])]
    results = {name: parts[name](options) for name in dict.fromkeys(chosen)}
    print(json.dumps(results))


# ---- padding


def padding(options: argparse.Namespace) -> dict[str, Any]:
    """Mean share of computed rows that are padding, over the rounds of each trace."""
    print("padded rows, share of all that are computed")
    found: dict[str, Any] = {}
    for path in options.trace:
        prompts, rows = rounds_of(path)
        for name, ladder in (("few cores", FEW), ("many cores", LADDER)):
            shares = {
                "prompts": padded_share(prompts, ladder),
                "prompts, next bucket": padded_share(prompts, ladder, next_bucket=True),
                "decodes": padded_share(rows, [b for b in ladder if b <= MAX_ROWS]),
                "decodes, next bucket": padded_share(
                    rows, [b for b in ladder if b <= MAX_ROWS], next_bucket=True
                ),
            }
            found[f"{path.stem}, {name}"] = shares
            shown = "  ".join(f"{key} {share:.1%}" for key, share in shares.items())
            print(f"  {path.stem}, {name}: {shown}")
    return found


def padded_share(counts: Sequence[int], buckets: Sequence[int], next_bucket: bool = False) -> float:
    """Mean over batches of the share of computed rows that nobody asked for.

    next_bucket: as if each batch, after pieces of the largest, went to the next larger bucket.
    """
    cover = covers(rule_of_thumb(buckets))
    largest = buckets[-1]
    shares = []
    for count in counts:
        full, rest = divmod(count, largest)
        if next_bucket:
            computed = min((b for b in buckets if b >= rest), default=0) if rest else 0
        else:
            computed = sum(cover[rest])
        computed += full * largest
        shares.append(1 - count / computed)
    return statistics.fmean(shares)


def rounds_of(path: Path) -> tuple[list[int], list[int]]:
    """(tokens of each prompt as one forward, rows of each decode round) of a trace served at its
    own pace with rounds of STEP_S.
    """
    with path.open() as file:
        lines = list(csv.DictReader(file))
    arrivals = [datetime.fromisoformat(line["TIMESTAMP"][:26]).timestamp() for line in lines]
    prompts = [min(int(line["ContextTokens"]), MAX_TOKENS) for line in lines]
    outputs = [int(line["GeneratedTokens"]) for line in lines]
    waiting = sorted(zip(arrivals, outputs, strict=True))[::-1]
    now, running, rows = waiting[-1][0], [], []
    while waiting or running:
        while waiting and waiting[-1][0] <= now and len(running) < MAX_ROWS:
            running.append(waiting.pop()[1])
        if running:
            rows.append(len(running))
        running = [left - 1 for left in running if left > 1]
        now = now + STEP_S if running or not waiting else max(now + STEP_S, waiting[-1][0])
    return prompts, rows


# ---- dispatch


def dispatch(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of Python a stage call, with kernels that do nothing."""
    import torch

    from dualpace.graphs.executor import Stages
    from dualpace.graphs.table import Entry, StageTable

    torch.set_num_threads(1)
    width, buckets = 576, (1, 4, 16, 64, 256)
    out = {bucket: torch.zeros(bucket, width) for bucket in buckets}
    heads = {bucket: torch.zeros(bucket, 9, 64) for bucket in buckets}

    def one(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return out[x.shape[0]]

    def three(x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (heads[x.shape[0]],) * 3

    weight = torch.zeros(())

    def table(graph: Callable[..., Any], num_weights: int) -> StageTable:
        entries = {b: Entry(graph, [(weight,) * num_weights], True) for b in buckets}
        return StageTable(entries, rule_of_thumb(buckets))

    stages = Stages({"pre_attention": table(three, 7), "post_attention": table(one, 4)})
    found: dict[str, Any] = {}
    print("Python of a stage call, us (median)")
    for rows in (1, 37, 64, 130):
        padded = stages.bucket(rows)
        x = torch.zeros(padded, width)[:rows]  # as the stage before leaves it
        attn, positions = torch.zeros(padded, width)[:rows], torch.zeros(rows, dtype=torch.int64)
        found[str(rows)] = {
            "pre_attention": _median_us(partial(stages.pre_attention, 0, x, positions)),
            "post_attention": _median_us(partial(stages.post_attention, 0, attn, x)),
        }
        shown = "  ".join(f"{stage} {us:.1f}" for stage, us in found[str(rows)].items())
        print(f"  {rows:4} rows, {padded:4} computed: {shown}")
    return found


def _median_us(call: Callable[[], object], repeats: int = 30, calls: int = 200) -> float:
    samples = []
    for _ in range(repeats):
        started = time.thread_time()
        for _ in range(calls):
            call()
        samples.append((time.thread_time() - started) / calls * 1e6)
    return round(statistics.median(samples), 2)


# ---- stages


def stages(options: argparse.Namespace) -> dict[str, Any]:
    """The tuner's times of each candidate, and the whole layers eager and as chosen."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.cache_dir or Path(scratch)
        found = _child(options, folder)
    print("tuner's times, us a call; chosen in brackets")
    for key, times in found["times"].items():
        best = found["chosen"][key]
        shown = "  ".join(
            f"[{name} {s * 1e6:.0f}]" if name == best else f"{name} {s * 1e6:.0f}"
            for name, s in times.items()
        )
        print(f"  {key:24} {shown}")
    return found


# ---- start


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the compile part of a start with no graphs, and with all of them."""
    with tempfile.TemporaryDirectory() as scratch:
        cold = _child(options, Path(scratch))
        warm = [_child(options, Path(scratch)) for _ in range(3)]
    found = {
        "cold_s": cold["seconds"],
        "cold_cpu_s": cold["cpu_seconds"],
        "warm_s": statistics.median(run["seconds"] for run in warm),
        "warm_cpu_s": statistics.median(run["cpu_seconds"] for run in warm),
        "warm_compiles": max(run["compiles"] for run in warm),
    }
    print("compile part of a start: " + "  ".join(f"{k} {v:.1f}" for k, v in found.items()))
    return found


def _child(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One start in a process of its own, as a worker of one core does it."""
    order = {
        "model": options.model,
        "dtype": options.dtype,
        "threads": options.threads,
        "folder": str(folder),
        "candidates": options.candidates.split(","),
    }
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, "-c", "from dualpace.graphs.bench import child; child()"]
    run = subprocess.run(
        command, input=json.dumps(order), env=environment, stdout=subprocess.PIPE, text=True
    )
    run.check_returncode()
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def child() -> None:
    """Builds all stages of a model and says how long it took."""
    import torch

    from dualpace.graphs.buckets import stage_buckets
    from dualpace.graphs.cache import GraphCache
    from dualpace.graphs.compiles import num_compiles
    from dualpace.graphs.load import load_weights
    from dualpace.graphs.source import resolve_source
    from dualpace.graphs.weights import DTYPES

    order = json.loads(sys.stdin.read())
    torch.set_num_threads(order["threads"])
    source = resolve_source(order["model"])
    weights = load_weights(source, DTYPES[order["dtype"]])
    started, cpu = time.monotonic(), _cpu_seconds()
    cache = GraphCache()
    found = cache.build(
        source.spec,
        weights,
        backend=order["candidates"],
        buckets=stage_buckets(MAX_TOKENS, MAX_ROWS, 2),
        max_context=min(source.spec.max_context, MAX_TOKENS),
        cache_dir=order["folder"],
    )
    result = {
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(_cpu_seconds() - cpu, 2),
        "compiles": num_compiles(),
        "times": {f"{stage} {bucket}": t for (stage, bucket), t in cache.times.items()},
        "chosen": {
            f"{stage} {bucket}": name
            for stage, table in found.tables().items()
            for bucket, name in table.names().items()
        },
    }
    print(json.dumps(result))


def _cpu_seconds() -> float:
    """Of this process and of the compilers that it has waited for."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)
