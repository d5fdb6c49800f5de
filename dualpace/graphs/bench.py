"""Benchmarks of the stage graphs: what dispatch costs, what padding wastes, how long starts take.

`python scripts/bench_graphs.py --help`; prints tables and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from dualpace.errors import ConfigError
from dualpace.graphs.bench_start import MAX_ROWS, MAX_TOKENS, launch, result_of, serve, start
from dualpace.graphs.buckets import (
    FEW,
    LADDER,
    covers,
    rule_of_thumb,
    stage_buckets,
)
from dualpace.graphs.config import BACKENDS
from dualpace.graphs.source import resolve_source
from dualpace.options import sentences, several, whole_number

STEP_S = 0.03  # of a decode round, for rows in a trace's decode rounds
BUCKETS = (1, 4, 16, 64, 256)  # of `dispatch`


def main(arguments: Sequence[str] | None = None) -> None:
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "padding": padding,
        "dispatch": dispatch,
        "stages": stages,
        "start": start,
        "serve": serve,
    }
    with sentences():
        options = _options(arguments, list(parts))
        results = {name: parts[name](options) for name in options.parts}
    print(json.dumps(results))


def _options(arguments: Sequence[str] | None, parts: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What dispatch of stage graphs costs, what padding wastes, how long starts "
        "take. Prints tables and ends with one JSON line.",
        epilog="example: python scripts/bench_graphs.py padding --trace AzureLLMInferenceTrace.csv",
    )
    usual = ["dispatch", "stages", "start"]
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default: {usual}")
    parser.add_argument("--overrides", nargs="*", default=[], help="settings of `serve`")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="Azure CSV file")
    parser.add_argument("--model", default="smollm2", help="as model.source (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bf16"))
    parser.add_argument("--threads", type=whole_number, default=1, help="of a worker")
    parser.add_argument(
        "--cores", type=whole_number, default=2, help="whose default buckets to build"
    )
    parser.add_argument(
        "--candidates",
        default="eager,packed,inductor,inductor-packed",
        help="backends to time (default: %(default)s)",
    )
    parser.add_argument("--cache-dir", type=Path, help="keep the graphs of `stages` here")
    options = parser.parse_args(arguments)
    several(vars(options) | {"parts": ",".join(options.parts or usual)}, "parts", parts)
    several({"--candidates": options.candidates}, "--candidates", BACKENDS)
    for file in options.trace:
        if not file.is_file():
            raise ConfigError(f"--trace={file} is not a file; give the trace's path.")
    if "padding" in options.parts and not options.trace:
        raise ConfigError("padding needs --trace FILE, the CSV file of an Azure trace.")
    chosen = [*(options.parts or usual), *(["padding"] if options.trace else [])]
    options.parts = list(dict.fromkeys(chosen))
    if set(usual) & set(options.parts):  # the others take no model, or settings that name one
        resolve_source(options.model)
    return options


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
    from dualpace.graphs.table import Entry, StageTable, Unpadded

    torch.set_num_threads(1)
    width, counts = 576, (1, 37, 64, 130, 256)
    out = {n: torch.zeros(n, width) for n in (*BUCKETS, *counts)}
    heads = {n: torch.zeros(n, 9, 64) for n in (*BUCKETS, *counts)}

    def one(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return out[x.shape[0]]

    def three(x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (heads[x.shape[0]],) * 3

    weight = torch.zeros(())

    def table(graph: Callable[..., Any], num_weights: int, costs: dict[int, float]) -> StageTable:
        entries = {b: Entry(graph, [(weight,) * num_weights], True) for b in BUCKETS}
        spare = Entry(graph, [(weight,) * num_weights], False)
        unpadded = Unpadded(dict.fromkeys(BUCKETS, spare), costs)
        return StageTable(entries, rule_of_thumb(BUCKETS), unpadded)

    # Costs of a call without padding: so high that it is never made, and a tenth above a bucket's.
    never = dict.fromkeys(BUCKETS, math.inf)
    dearer = {bucket: 1.1 * cost for bucket, cost in rule_of_thumb(BUCKETS).items()}
    found: dict[str, Any] = {}
    print("Python of a stage call, us (median)")
    for name, costs in (("compiled buckets alone", never), ("beside any row count", dearer)):
        stages = Stages(
            {
                "pre_attention": table(three, 7, costs),
                "post_attention": table(one, 4, costs),
            }
        )
        for rows in counts:
            pieces = [size for size, _, _ in stages.tables()["post_attention"].pieces(rows)]
            padded = stages.bucket(rows)
            x = torch.zeros(padded, width)[:rows]  # as the stage before leaves it
            attn = torch.zeros(padded, width)[:rows]
            positions = torch.zeros(rows, dtype=torch.int64)
            times = {
                "pre_attention": _median_us(partial(stages.pre_attention, 0, x, positions)),
                "post_attention": _median_us(partial(stages.post_attention, 0, attn, x)),
            }
            found[f"{rows}, {name}"] = times
            shown = "  ".join(f"{stage} {us:.1f}" for stage, us in times.items())
            print(f"  {rows:4} rows, {name}, {padded:4} computed in {len(pieces)}: {shown}")
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
    """The tuner's times of each candidate, what was chosen, and what that leaves of overhead."""
    buckets = stage_buckets(MAX_TOKENS, MAX_ROWS, options.cores)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.cache_dir or Path(scratch)
        found = result_of(launch(options, folder, buckets))
    print("tuner's times, us a call; chosen in brackets")
    for key, times in found["times"].items():
        best = found["chosen"][key]
        shown = "  ".join(
            f"[{name} {s * 1e6:.0f}]" if name == best else f"{name} {s * 1e6:.0f}"
            for name, s in times.items()
        )
        print(f"  {key:24} {shown}")
    found["slower_than_eager"] = [
        key for key, times in found["times"].items() if times[found["chosen"][key]] > times["eager"]
    ]
    print("padding and dispatch, share of a call's time without either, mean over all row counts:")
    for stage, share in found["overheads"].items():
        print(f"  {stage:20} {share:.1%}")
    return found
