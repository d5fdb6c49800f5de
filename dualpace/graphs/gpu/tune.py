"""Measures which product serves each bucket best on this device, compiling candidates in parallel.

A candidate is timed with the kernel that finishes its work, over all layers of the model in one
CUDA graph, so that no weight is found in the cache. One rank of several times its part alone, and
the ranks may choose unlike. The table goes to disk under a key of everything that could change it.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from dualpace.graphs.gpu import skinny
from dualpace.graphs.gpu.capture import Capturer
from dualpace.graphs.gpu.device import launch_options, num_sms
from dualpace.graphs.gpu.forward import Forward, Rows
from dualpace.graphs.gpu.linear import PRODUCTS, Choices, candidates
from dualpace.graphs.gpu.skinny import BEST, MAX_ROWS, PARTIAL, SILU, Skinny, block_rows
from dualpace.graphs.spec import ModelSpec

_REPEATS = 5
_LIBRARY_HANDICAP = 1.05
_EPILOGUES = {"gate_up": SILU, "head": BEST}

# Block of rows, cut, epilogue, dtype, steps to prefetch.
_Job = tuple[int, Skinny, int, torch.dtype, int]


def table_path(folder: Path, forward: Forward) -> tuple[Path, str]:
    """(file, key) of a model shape's table on this device."""
    source = b"".join(Path(m).read_bytes() for m in (skinny.__file__, __file__))
    shapes = [tuple(shape_of(forward.spec, product)) for product in PRODUCTS]
    name = torch.cuda.get_device_name(forward.device)
    versions = (torch.__version__, triton.__version__, hashlib.sha256(source).hexdigest()[:16])
    key = repr((name, forward.dtype, shapes, forward.is_part, versions))
    return folder / f"products-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json", key


def shape_of(spec: ModelSpec, product: str) -> tuple[int, int]:
    """(columns, depth) of a product; columns of one output for gate_up."""
    return {
        "qkv": (spec.q_size + 2 * spec.kv_size, spec.hidden),
        "o": (spec.hidden, spec.q_size),
        "gate_up": (spec.intermediate, spec.hidden),
        "down": (spec.hidden, spec.intermediate),
        "head": (spec.vocab, spec.hidden),
    }[product]


def tune(
    forward: Forward,
    buckets: Sequence[int],
    folder: Path | None = None,
    processes: int = 8,
    progress: Callable[[str], None] = lambda line: None,
) -> Choices:
    """Fills `forward.choices` for `buckets`, from disk where it can, and returns it.

    Only buckets up to 64 rows have anything to choose, and float32 has not.
    """
    few = [bucket for bucket in buckets if bucket <= MAX_ROWS]
    if forward.dtype == torch.float32 or not few:
        return forward.choices
    path, key = table_path(folder, forward) if folder else (None, "")
    stored = Choices.load(path, key) if path else None
    choices = forward.choices
    if stored is not None:
        choices.table.update(stored.table)
        choices.times.update(stored.times)
    missing = [b for b in few if any((p, b) not in choices.table for p in PRODUCTS)]
    if missing:
        in_processes(compile_one, jobs(forward, missing), processes)
        progress(f"compiled candidates for {missing} rows")
        rows = Rows.empty(forward.spec, max(missing), forward.dtype, forward.device)
        for tensor in (rows.x, rows.h, rows.attn, rows.act):
            tensor.normal_()
        for bucket in missing:
            for product in PRODUCTS:
                best = measure(forward, product, rows.first(bucket))
                progress(f"{product} at {bucket} rows: {best}")
        if path:
            choices.save(path, key)
    return choices


def options(forward: Forward, product: str, bucket: int) -> list[Skinny | None]:
    columns, depth = shape_of(forward.spec, product)
    return list(candidates(product, columns, depth, bucket, num_sms(forward.device)))


def jobs(forward: Forward, buckets: Iterable[int]) -> list[_Job]:
    """Every kernel to compile, once: splits share one."""
    found: dict[_Job, None] = {}
    for bucket in buckets:
        for product in PRODUCTS:
            for how in options(forward, product, bucket):
                if how is not None:
                    cut = replace(how, split=1)
                    steps = skinny.prefetched(shape_of(forward.spec, product)[1], how)
                    epilogue = _EPILOGUES.get(product, PARTIAL)
                    found[(block_rows(bucket), cut, epilogue, forward.dtype, steps)] = None
    return list(found)


def in_processes(compile_job: Callable[[Any], None], todo: Sequence[Any], processes: int) -> None:
    """Compiles in child processes, which leave their results in Triton's cache on disk."""
    if processes > 1 and len(todo) > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(processes, len(todo)), context) as pool:
            list(pool.map(compile_job, todo))


def compile_one(job: _Job) -> None:
    """One kernel for arguments like those of a real launch."""
    rows, how, epilogue, dtype, steps = job
    sums = torch.float32 if epilogue != SILU else dtype
    index = torch.int32 if epilogue == BEST else sums
    # Sizes stand for any multiple of 16, which is all that is compiled in.
    skinny.skinny_kernel.warmup(
        dtype,
        dtype,
        sums,
        index,
        rows,
        4096,
        4096,
        BLOCK_M=rows,
        BLOCK_N=how.block_n,
        BLOCK_K=how.block_k,
        WIDTH=how.columns,
        EPILOGUE=epilogue,
        PREFETCHED=steps,
        num_warps=how.warps,
        num_stages=how.stages,
        grid=(1,),
        **launch_options(torch.device("cuda", torch.cuda.current_device())),
    )


def measure(forward: Forward, product: str, rows: Rows) -> str:
    """Times the candidates of one product and bucket and keeps the best. Returns a line."""
    bucket = rows.x.shape[0]
    times: dict[str, float] = {}
    table = forward.choices.table
    best: tuple[float, Skinny | None] = (float("inf"), None)
    for how in options(forward, product, bucket):
        table[(product, bucket)] = how
        time = time_of(work_of(forward, product, rows), forward.device)
        times[str(how)] = time
        # In a step, a kernel of ours also starts early and fetches its weight ahead.
        best = min(best, (time * (_LIBRARY_HANDICAP if how is None else 1.0), how), key=_first)
    table[(product, bucket)] = best[1]
    forward.choices.times[(product, bucket)] = times
    return f"{best[1]} {best[0] * 1e3:.1f} us, library {times['None'] * 1e3:.1f} us"


def _first(entry: tuple[float, Skinny | None]) -> float:
    return entry[0]


def work_of(forward: Forward, product: str, rows: Rows) -> list[Callable[[], object]]:
    """The product with what finishes it, once a layer."""
    forward = forward.apart()
    layers = range(forward.spec.num_layers)
    if product == "head":
        return [partial(forward.greedy, rows.h, rows.tokens)]
    if product == "qkv":
        positions = torch.zeros(rows.x.shape[0], dtype=torch.int64, device=forward.device)
        return [partial(forward.pre_attention, i, rows, positions) for i in layers]
    stage = {"o": forward.output, "gate_up": forward.gate_up, "down": forward.down}[product]
    return [partial(stage, i, rows) for i in layers]


def time_of(work: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Milliseconds of one piece of `work`, by replaying all of them in one graph; the median."""

    def run() -> None:
        for piece in work:
            piece()

    capturer = Capturer(device)
    capturer.warm_up(work[0])
    graph = capturer.capture(run)
    graph.replay()
    times: list[float] = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(work))
    return sorted(times)[_REPEATS // 2]
