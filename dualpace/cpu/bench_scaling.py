"""Benchmark of scaling: attention and the dense stage over thread counts, beside their ceilings.

This file knows nothing about serving.
"""

from statistics import median
from typing import Any

import torch

from dualpace.cpu.attention_case import AttentionCase
from dualpace.cpu.bench_dense import DenseCase
from dualpace.cpu.ceilings import Reader, TileSpinner, in_turns

# Key of a record, its panel, its label.
_LINES = (
    ("read_gb_s", 0, "plain read of the pool"),
    ("attention_gb_s", 0, "paged attention"),
    ("peak_tflop_s", 1, "tile unit, from registers"),
    ("amx_tflop_s", 1, "tile GEMM"),
    ("avx512_bf16_tflop_s", 1, "tile GEMM, by vectors"),
    ("onednn_tflop_s", 1, "oneDNN, packed"),
)


def scaling_table(
    attention: AttentionCase, dense: DenseCase, rows: int, most: int, repeats: int
) -> list[dict[str, Any]]:
    """A record for 1, 2, 4, ... and `most` threads: attention, and the dense stage of `rows`."""
    print(
        f"\nscaling, attention {attention.rows} x {attention.context}, dense {rows} rows; medians"
    )
    records = []
    x, residual = dense.inputs(rows)
    for threads in [n for n in (1, 2, 4, 8, 16, 32, 64) if n < most] + [most]:
        torch.set_num_threads(threads)
        attention.plan(threads)
        reader = Reader(attention.memory, threads)
        runs = {"attention": attention.run, "read": reader.run, **dense.runs(x, residual)}
        spinner = TileSpinner(threads) if dense.has_tiles else None
        if spinner:
            runs["peak"] = spinner.run
        seconds = {
            name: median(times)
            for name, times in in_turns(runs, max(2, repeats * threads // most)).items()
        }
        record: dict[str, Any] = {
            "threads": threads,
            "read_gb_s": round(reader.bytes / seconds["read"] / 1e9, 1),
            "attention_gb_s": round(attention.bytes / seconds["attention"] / 1e9, 1),
        }
        for name in dense.candidates:
            record[f"{name}_tflop_s"] = round(rows * dense.bytes / seconds[name] / 1e12, 3)
        if spinner:
            record["peak_tflop_s"] = round(spinner.flops / seconds["peak"] / 1e12, 2)
        records.append(record)
        print("  ".join(f"{key} {value}" for key, value in record.items()), flush=True)
    torch.set_num_threads(most)
    return records


def draw_scaling(records: list[dict[str, Any]], path: str) -> None:
    """The records of `scaling_table` as a figure of two panels in the file `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = [r["threads"] for r in records]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4))
    for key, panel, label in _LINES:
        if key in records[0]:
            panels[panel].plot(counts, [r[key] for r in records], marker="o", label=label)
    for axes, unit in zip(panels, ("GB/s", "TFLOP/s"), strict=True):
        axes.set(xlabel="threads", ylabel=unit)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
