"""What ranks on CPUs cost and gain: their sums by Gloo and by shared memory, and a layer's dense
stages in one process with all cores against several with a share each. See scripts/bench_tp.py.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualpace.graphs.cache import GraphCache
from dualpace.graphs.collective import Alone, Collective, TorchCollective
from dualpace.graphs.load import load_weights
from dualpace.graphs.sampling import SamplingRows
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.shard import Shard
from dualpace.graphs.shared_memory_collective import SharedMemoryCollective
from dualpace.graphs.source import Source
from dualpace.graphs.weights import DTYPES

ROWS, HIDDEN = (1, 8, 64, 256), 4096
SECTIONS = ("sums", "layers")
_SECONDS = 0.5  # of each measurement
_CONTEXT = 4096

# Affinity comes first: threads are made for the cores that are allowed when torch is imported.
RANK = (
    "import json, os, sys; os.sched_setaffinity(0, json.loads(sys.argv[1])['cores']); "
    "from dualpace.graphs.bench_cpu_ranks import rank_main; rank_main()"
)
Run = Callable[[str, list[dict[str, Any]], float], bool]


def report(
    options: dict[str, str], size: int, folder: Path, run: Run
) -> tuple[dict[str, Any], bool]:
    """Runs the sections in processes by `run`, prints tables; (results, whether any failed)."""
    limit = float(options.get("limit_s", 240))
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // size)
    parts = [cores[rank * share : (rank + 1) * share] or cores for rank in range(size)]
    result: dict[str, Any] = {"cores": len(cores), "ranks": size}
    failed = False
    if "sums" in (sections := options.get("sections", ",".join(SECTIONS)).split(",")):
        found, failed = _run_group("sums", options, folder, parts, run, limit)
        result["sums_us"] = found
        print(f"sum of {size} ranks over rows of {HIDDEN}, us (median of rank 0)")
        print(f"  {'dtype':8} {'rows':>5} {'gloo':>9} {'shared memory':>14} {'ratio':>6}")
        for dtype, of_rows in found.items():
            for rows, us in of_rows.items():
                us["ratio"] = round(us["gloo"] / us["shared_memory"], 1)
                shown = f"{us['gloo']:9.1f} {us['shared_memory']:14.1f} {us['ratio']:6.1f}"
                print(f"  {dtype:8} {rows:>5} {shown}")
    if "layers" in sections:
        alone, no_alone = _run_group("layers", options, folder, [cores], run, limit)
        ranks, no_ranks = _run_group("layers", options, folder, parts, run, limit)
        failed = failed or no_alone or no_ranks
        result["layers_ms"] = {"alone": alone, "ranks": ranks}
        print(f"dense stages, ms: 1 rank of {len(cores)} cores, {size} of {share}, gain")
        for rows in ranks:
            for stage, ms in ranks[rows].items():
                gain = alone[rows][stage] / ms
                print(
                    f"  {rows:>5} rows, {stage:9} {alone[rows][stage]:9.3f} {ms:9.3f} {gain:6.2f}x"
                )
    return result, failed


def _run_group(
    section: str,
    options: dict[str, str],
    folder: Path,
    parts: list[list[int]],
    run: Run,
    limit: float,
) -> tuple[dict[str, Any], bool]:
    """One group of ranks, a rank for each part of the cores."""
    size = len(parts)
    (folder / "meeting").unlink(missing_ok=True)
    (folder / "memory").write_bytes(bytes(SharedMemoryCollective.num_bytes(size)))
    order = {"options": options, "section": section, "size": size, "folder": str(folder)}
    orders = [order | {"rank": rank, "cores": part} for rank, part in enumerate(parts)]
    failed = run(RANK, orders, limit)
    path = folder / f"{section}-of-{size}.json"
    return (json.loads(path.read_text()) if path.is_file() else {}), failed


def rank_main() -> None:
    """A rank's life: one section, whose result rank 0 leaves in a file."""
    order = json.loads(sys.argv[1])
    rank, size, folder = order["rank"], order["size"], Path(order["folder"])
    torch.set_num_threads(int(order["options"].get("threads", len(order["cores"]))))
    shared: Collective = Alone()
    if size > 1:
        with (folder / "memory").open("r+b") as file:
            view = mmap.mmap(file.fileno(), 0)
        shared = SharedMemoryCollective(view, rank, size)
    with torch.inference_mode():
        if order["section"] == "sums":
            gloo = TorchCollective.join("gloo", rank, size, folder / "meeting")
            result = _sums({"gloo": gloo, "shared_memory": shared})
        else:
            result = _layers(order["options"], Shard(rank, size), shared)
    if rank == 0:
        (folder / f"{order['section']}-of-{size}.json").write_text(json.dumps(result))


def _sums(collectives: dict[str, Collective]) -> dict[str, Any]:
    """Microseconds by dtype, rows and collective."""
    result: dict[str, dict[int, dict[str, float]]] = {}
    for dtype in ("bf16", "float32"):
        for rows in ROWS:
            x = torch.zeros(rows, HIDDEN, dtype=DTYPES[dtype])
            entry = result.setdefault(dtype, {}).setdefault(rows, {})
            for name, collective in collectives.items():
                seconds = _median(partial(collective.all_reduce, x), collective)
                entry[name] = round(seconds * 1e6, 1)
    return result


def _layers(options: dict[str, str], shard: Shard, collective: Collective) -> dict[str, Any]:
    """Milliseconds by rows of one layer's dense stages, the embedding and the greedy head."""
    spec = dataclasses.replace(
        SHAPES[options.get("model", "llama-3.2-1b")], num_layers=int(options.get("layers", 2))
    )
    source = Source("random", None, spec, "random")
    weights = load_weights(source, DTYPES[options.get("dtype", "float32")], 0, shard)
    stages = GraphCache().build(
        spec,
        weights,
        backend=options.get("backend", "packed"),
        max_context=_CONTEXT,
        shard=shard,
        collective=collective,
    )
    result = {}
    for rows in ROWS:
        ids = torch.zeros(rows, dtype=torch.int64)
        x = stages.pre_layer(ids)
        attn = x.new_zeros(rows, shard.local(spec).q_size)

        def layers(x: Tensor = x, ids: Tensor = ids, attn: Tensor = attn) -> None:
            for layer in range(spec.num_layers):
                stages.pre_attention(layer, x, ids)
                stages.post_attention(layer, attn, x)

        seconds = {
            "layer": _median(layers, collective) / spec.num_layers,
            "embedding": _median(partial(stages.pre_layer, ids), collective),
            "head": _median(partial(stages.post_layer, x, SamplingRows.greedy(rows)), collective),
        }
        result[str(rows)] = {stage: round(s * 1e3, 3) for stage, s in seconds.items()}
    return result


def _median(call: Callable[[], object], collective: Collective) -> float:
    """Seconds of a call, which all ranks make equally often."""
    call()
    began = time.perf_counter()
    call()
    once = collective.all_gather(torch.tensor([time.perf_counter() - began])).max()
    times = []
    for _ in range(max(5, min(2000, int(_SECONDS / float(once))))):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
