"""Benchmarks of tensor parallelism: starts a process a rank, prints tables, ends with a JSON line.

What a rank measures is in bench_cpu_ranks.py and gpu/bench/ranks.py. See scripts/bench_tp.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.weights import DTYPES
from dualpace.options import key_values, number, sentences, several, whole

_KEYS = (
    *("device", "ranks", "sections", "model", "layers", "dtype", "backend", "threads"),
    *("processes", "limit_s", "folder", "out"),
)
_GPU_RANK = "from dualpace.graphs.bench_ranks import gpu_rank; gpu_rank()"


@sentences()
def main(arguments: list[str], text: str = __doc__) -> int:
    """`text` is what `--help` prints."""
    options = key_values(arguments, text, _KEYS)
    device, size = _checked(options)
    if device == "cuda" and torch.cuda.device_count() < size:
        print(f"{size} GPUs are needed and {torch.cuda.device_count()} are here: nothing was run")
        print(json.dumps({"skipped": f"fewer than {size} GPUs"}))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.get("folder", scratch))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meeting").unlink(missing_ok=True)
        if device == "cpu":
            from dualpace.graphs.bench_cpu_ranks import report

            result, failed = report(options, size, folder, _run)
        else:
            result, failed = _gpu(options, size, folder)
    line = json.dumps(result)
    if "out" in options:
        Path(options["out"]).write_text(line + "\n")
    print(line)
    return failed


def _checked(options: dict[str, str]) -> tuple[str, int]:
    """(device, ranks). ConfigError for values that cannot be used, before any rank starts."""
    device = options.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    several({"device": device}, "device", ("cpu", "cuda"))
    if device == "cpu":
        from dualpace.graphs.bench_cpu_ranks import SECTIONS

        several(options, "sections", SECTIONS)
    if "model" in options:
        several(options, "model", tuple(SHAPES))
    if "dtype" in options:
        several(options, "dtype", tuple(DTYPES))
    for key in ("layers", "threads", "processes"):
        whole(options, key, 1)
    number(options, "limit_s", 1)
    return device, whole(options, "ranks", 2)


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
