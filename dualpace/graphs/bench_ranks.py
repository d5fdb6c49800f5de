"""Benchmarks of tensor parallelism: collectives of CPU ranks here, ranks of GPUs in gpu/bench.

`python scripts/bench_tp.py [key=value]`, see its text. Starts a process a rank, prints tables and
ends with one JSON line.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROWS, HIDDEN = (1, 8, 64, 256), 4096
_SECONDS = 0.5  # of each measurement
_CPU_RANK = "from dualpace.graphs.bench_ranks import cpu_rank; cpu_rank()"
_GPU_RANK = "from dualpace.graphs.bench_ranks import gpu_rank; gpu_rank()"


def main(arguments: list[str]) -> int:
    options = dict(argument.split("=", 1) for argument in arguments)
    device = options.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    size = int(options.get("ranks", 2))
    if device == "cuda" and torch.cuda.device_count() < size:
        print(f"{size} GPUs are needed and {torch.cuda.device_count()} are here: nothing was run")
        print(json.dumps({"skipped": f"fewer than {size} GPUs"}))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.get("folder", scratch))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meeting").unlink(missing_ok=True)
        report = _cpu if device == "cpu" else _gpu
        result, failed = report(options, size, folder)
    line = json.dumps(result)
    if "out" in options:
        Path(options["out"]).write_text(line + "\n")
    print(line)
    return failed


def _run(code: str, orders: list[dict[str, Any]], limit_s: float) -> bool:
    """A process a rank; whether any failed, or was ended at the limit."""
    # Multicast of NVLink is not needed here, and not every host lets it be used.
    quiet = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(order)], env=quiet | dict(os.environ)
        )
        for order in orders
    ]
    deadline, failed = time.monotonic() + limit_s, False
    try:
        while any(process.poll() is None for process in processes):
            failed = failed or any(process.poll() for process in processes)
            if failed or time.monotonic() > deadline:
                failed = True
                break
            time.sleep(0.05)
        return failed or any(process.returncode for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


# ---- CPU


def _cpu(options: dict[str, str], size: int, folder: Path) -> tuple[dict[str, Any], bool]:
    from dualpace.graphs.shared_memory_collective import SharedMemoryCollective

    (folder / "memory").write_bytes(bytes(SharedMemoryCollective.num_bytes(size)))
    order = {"size": size, "folder": str(folder), "threads": int(options.get("threads", 1))}
    limit = float(options.get("limit_s", 240))
    failed = _run(_CPU_RANK, [order | {"rank": rank} for rank in range(size)], limit)
    path = folder / "rank-0.json"
    result = json.loads(path.read_text()) if path.is_file() else {}
    print(f"all-reduce of {size} ranks, us (median of rank 0)")
    print(f"  {'dtype':8} {'rows':>5} {'gloo':>9} {'shared memory':>14} {'ratio':>6}")
    for dtype, of_rows in result.items():
        for rows, us in of_rows.items():
            us["ratio"] = round(us["gloo"] / us["shared_memory"], 1)
            shown = f"{us['gloo']:9.1f} {us['shared_memory']:14.1f} {us['ratio']:6.1f}"
            print(f"  {dtype:8} {rows:>5} {shown}")
    return result, failed


def cpu_rank() -> None:
    """A rank's life: times both collectives in turns and leaves a file."""
    from dualpace.graphs.collective import Collective, TorchCollective
    from dualpace.graphs.shared_memory_collective import SharedMemoryCollective

    order = json.loads(sys.argv[1])
    rank, size, folder = order["rank"], order["size"], Path(order["folder"])
    torch.set_num_threads(order["threads"])
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // size
    if share:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])
    with (folder / "memory").open("r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
    collectives: dict[str, Collective] = {
        "gloo": TorchCollective.join("gloo", rank, size, folder / "meeting"),
        "shared_memory": SharedMemoryCollective(view, rank, size),
    }
    result: dict[str, dict[int, dict[str, float]]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for rows in ROWS:
            x = torch.zeros(rows, HIDDEN, dtype=dtype)
            entry = result.setdefault(str(dtype).removeprefix("torch."), {}).setdefault(rows, {})
            for name, collective in collectives.items():
                began = time.perf_counter()
                collective.all_reduce(x)
                once = torch.tensor([time.perf_counter() - began])
                # All ranks must agree on how often.
                slowest = collectives["gloo"].all_gather(once).max()
                times = []
                for _ in range(max(10, min(2000, int(_SECONDS / float(slowest))))):
                    began = time.perf_counter()
                    collective.all_reduce(x)
                    times.append(time.perf_counter() - began)
                entry[name] = round(statistics.median(times) * 1e6, 1)
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    TorchCollective.leave()


# ---- GPU


def _gpu(options: dict[str, str], size: int, folder: Path) -> tuple[dict[str, Any], bool]:
    orders: list[dict[str, Any]] = [
        options | {"rank": str(rank), "size": str(size), "folder": str(folder)}
        for rank in range(size)
    ]
    failed = _run(_GPU_RANK, orders, float(options.get("limit_s", 225)))
    paths = [folder / f"rank-{rank}.json" for rank in range(size)]
    results = [json.loads(path.read_text()) if path.is_file() else {} for path in paths]
    result: dict[str, Any] = results[0]
    for rank, other in enumerate(results):
        if errors := {key: text for key, text in other.items() if key.endswith("_failed")}:
            result[f"rank_{rank}_errors"], failed = errors, True
    result["failed"] = failed
    columns = ("alone", "nccl", "peers", "gain_nccl", "gain_peers")
    for key in ("stages_library_ms", "stages_tuned_ms"):
        for rows, of_stage in result.get(key, {}).items():
            print(f"{key}, {rows} rows: {'':6}" + "".join(f"{name:>11}" for name in columns))
            for stage, t in of_stage.items():
                shown = "".join(f"{t[name]:11.3f}" if name in t else " " * 11 for name in columns)
                print(f"  {stage:30}{shown}")
    return result, failed


def gpu_rank() -> None:
    from dualpace.graphs.gpu.bench.ranks import main as rank_main

    rank_main(json.loads(sys.argv[1]))
