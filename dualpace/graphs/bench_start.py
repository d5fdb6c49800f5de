"""How long starts take: `start` builds the stages of both engines as their workers do, `serve`
starts the whole server and reads its own time line.

A worker's processor seconds are its start on a core of its own, whatever else runs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualpace.graphs.buckets import PIECE_S, interpolated, stage_buckets

if TYPE_CHECKING:
    from dualpace.graphs.table import StageTable
    from dualpace.graphs.tuner import Times

MAX_ROWS, MAX_TOKENS = 256, 8192  # of batches: the defaults of a plan
WARM_STARTS = 3
# Phases of a worker's start that compile, load what was compiled, tune or capture.
COMPILE_PHASES = ("stages", "products", "graphs", "warm_up", "assists")


def start(options: argparse.Namespace) -> dict[str, Any]:
    """The compile part of starts: cold and warm `ahead`, and `tiered` until it could serve."""
    workers = engine_workers(options.cores)
    for name, buckets in workers.items():
        shown = "; ".join(f"{s} {' '.join(map(str, sizes))}" for s, sizes in buckets.items())
        print(f"buckets, {name} worker: {shown}")
    with tempfile.TemporaryDirectory() as scratch:
        found = {"cold ahead": _start(options, workers, Path(scratch), "ahead")}
        warm = [_start(options, workers, Path(scratch), "ahead") for _ in range(WARM_STARTS)]
        found["warm ahead"] = sorted(warm, key=lambda run: run["cpu_s"])[WARM_STARTS // 2]
    with tempfile.TemporaryDirectory() as scratch:
        found["tiered, to ready"] = _start(options, workers, Path(scratch), "tiered")
    print(f"compile part of a start of {options.model}, both workers at once, a core each; seconds")
    for name, run in found.items():
        print(
            f"  {name:18} by the clock {run['wall_s']:6.1f}   of a processor, the slower worker "
            f"{run['cpu_s']:6.1f}   compilations {run['compiles']}"
        )
    return found


def engine_workers(cores: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Each engine's worker and the buckets of its stages."""
    return {
        "accelerator": stage_buckets(MAX_TOKENS, MAX_ROWS, cores),
        "cpu": stage_buckets(MAX_ROWS, MAX_ROWS, cores),
    }


def _start(
    options: argparse.Namespace,
    workers: Mapping[str, dict[str, tuple[int, ...]]],
    folder: Path,
    how: str,
) -> dict[str, Any]:
    """Both workers at once over one cache folder: the slower one's seconds."""
    cores = sorted(os.sched_getaffinity(0))
    running = []
    for index, buckets in enumerate(workers.values()):
        own = [cores[index % len(cores)]] if options.threads == 1 else cores
        running.append(launch(options, folder, buckets, how, own))
    results = [result_of(process) for process in running]
    return {
        "wall_s": max(r["seconds"] for r in results),
        "cpu_s": max(r["cpu_seconds"] for r in results),
        "compiles": sum(r["compiles"] for r in results),
    }


def launch(
    options: argparse.Namespace,
    folder: Path,
    buckets: Mapping[str, tuple[int, ...]],
    how: str = "ahead",
    cores: list[int] | None = None,
) -> subprocess.Popen[str]:
    """A start in a process of its own. The compiler's own files lie in `folder` too."""
    order = {
        "model": options.model,
        "dtype": options.dtype,
        "threads": options.threads,
        "folder": str(folder),
        "candidates": options.candidates.split(","),
        "buckets": dict(buckets),
        "start": how,
        "cores": cores,
    }
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", "from dualpace.graphs.bench_start import child; child()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.close()
    return process


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    if process.wait() != 0:
        raise RuntimeError(f"a start ended with status {process.returncode}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def child() -> None:
    """Builds all stages of a model and says how long it took."""
    order = json.loads(sys.stdin.readline())
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    import torch

    from dualpace.graphs.cache import GraphCache
    from dualpace.graphs.compiles import num_compiles
    from dualpace.graphs.load import load_weights
    from dualpace.graphs.source import resolve_source
    from dualpace.graphs.weights import DTYPES

    torch.set_num_threads(order["threads"])
    source = resolve_source(order["model"])
    weights = load_weights(source, DTYPES[order["dtype"]])
    started, cpu = time.monotonic(), _cpu_seconds()
    cache = GraphCache()
    stages = cache.build(
        source.spec,
        weights,
        backend=order["candidates"],
        buckets=order["buckets"],
        max_context=min(source.spec.max_context, MAX_TOKENS),
        cache_dir=order["folder"],
        processes=order["threads"] if order["threads"] > 1 else 0,
        start=order["start"],
    )
    result = {
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(_cpu_seconds() - cpu, 2),
        "compiles": num_compiles(),
        "times": {f"{stage} {bucket}": t for (stage, bucket), t in cache.times.items()},
        "chosen": {
            f"{stage} {bucket}": name
            for stage, table in stages.tables().items()
            for bucket, name in table.names().items()
        },
        "overheads": overheads(stages.tables(), cache.times),
    }
    cache.close()
    print(json.dumps(result))


def overheads(
    tables: Mapping[str, StageTable], times: Mapping[tuple[str, int], Times]
) -> dict[str, float]:
    """By stage: how much longer than the fastest candidate at exactly their rows batches take, for
    padding, pieces and Python; the mean over 1 row to the largest bucket. Times between buckets are
    interpolated, PIECE_S is the Python of a call.
    """
    found = {}
    for stage in {stage: None for stage, _ in times}:
        of_stage = {bucket: t for (name, bucket), t in times.items() if name == stage}
        largest, names = max(of_stage), next(iter(of_stage.values()))
        costs = {
            name: interpolated({b: t[name] for b, t in of_stage.items()}, largest) for name in names
        }
        shares = []
        for rows in range(1, largest + 1):
            pieces = tables[stage].pieces(rows)
            taken = sum(PIECE_S + costs[entry.name][computed] for _, computed, entry in pieces)
            shares.append(taken / min(cost[rows] for cost in costs.values()) - 1)
        found[stage] = statistics.fmean(shares)
    return found


def _cpu_seconds() -> float:
    """Of this process and of the compilers that it has waited for."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


# ---- the whole server


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """The server's own time line with nothing kept, with everything, and tiered with nothing."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as empty:
        starts = [
            ("cold ahead", kept, "ahead"),
            *[("warm ahead", kept, "ahead")] * WARM_STARTS,
            ("tiered", empty, "tiered"),
        ]
        runs: dict[str, list[dict[str, float]]] = {}
        for name, folder, how in starts:
            runs.setdefault(name, []).append(_serve(options.overrides, folder, how))
    for name, lines in runs.items():
        found[name] = {
            worker: round(statistics.median(line[worker] for line in lines), 1)
            for worker in lines[0]
        }
        shown = "  ".join(f"{worker} {seconds:.1f}" for worker, seconds in found[name].items())
        print(f"{name}, seconds of the compile part by worker, and to ready: {shown}")
    return found


def _serve(overrides: list[str], folder: str, how: str) -> dict[str, float]:
    """Starts a server, ends it when it is ready, and says what its time line says."""
    command = [sys.executable, "-c", "from dualpace.cli import serve; serve()", *overrides]
    command += [f"compile.cache_dir={folder}", f"compile.start={how}", "server.port=0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Triton's kernels and the compiler's headers are part of what is kept or not.
        env=os.environ | {"TMPDIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"},
        text=True,
    )
    assert process.stdout is not None
    seen: list[str] = []
    try:
        for line in process.stdout:
            seen.append(line)
            if "ready after" in line:
                return compile_seconds(seen)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
    raise RuntimeError("the server did not start; it said:\n" + "".join(seen[-20:]))


def compile_seconds(log: list[str]) -> dict[str, float]:
    """Seconds of the compile part by worker, and of all to ready, from the server's time line."""
    first = next(i for i, line in enumerate(log) if "Start, seconds" in line)
    workers = re.findall(r"(\w+) worker", log[first])
    found = dict.fromkeys(workers, 0.0)
    for name, cells in _phases(log[first + 1 :]):
        if name == "ready after":
            found["ready"] = float(cells[0])
        elif name in (*COMPILE_PHASES, "building stages"):
            for worker, cell in zip(workers, cells, strict=True):
                found[worker] += 0.0 if cell == "-" else float(cell)
    return found


def _phases(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    for line in lines:
        match = re.search(r"  (\S[\w ]*?)((?:\s+(?:\d+\.\d|-))+)\s*$", line)
        if match:
            yield match[1], match[2].split()
