"""Benchmark of the dense stage after attention: oneDNN's packed weights and the tile GEMM, by tiles
or vectors.

The candidates take turns, on the same threads. Where there is a tile unit, its rate from registers
is taken right before and after each call as well: on a shared host it doubles and halves within a
minute. Weights rotate through more memory than the last-level cache holds. This file knows nothing
about serving.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dualpace.cpu import packed
from dualpace.cpu.ceilings import TileSpinner, beside, in_turns
from dualpace.cpu.dense_stage import PostAttention, Rooms, norm_rows
from dualpace.cpu.gemm import Unit

BF16 = torch.bfloat16
GB = 1e9
EPS = 1e-5
Layer = Callable[[Tensor, Tensor], Tensor]


class DenseCase:
    """O, norm, gate and up, and down of one layer in a few sets, as each candidate keeps them."""

    def __init__(
        self, hidden: int, intermediate: int, attn: int, memory: int, unit: Unit | None
    ) -> None:
        """unit: what multiplies beside oneDNN, if anything."""
        self.hidden, self.attn = hidden, attn
        shapes = ((hidden, attn), (2 * intermediate, hidden), (hidden, intermediate))
        self.bytes = 2 * sum(n * k for n, k in shapes)
        sets = max(2, -(-memory // self.bytes))
        # One set of numbers for all: what differs between sets is where they lie.
        self.weights = [torch.randn(n, k).mul_(k**-0.5).to(BF16) for n, k in shapes]
        self.candidates: dict[str, list[Layer]] = {}
        self.candidates["onednn"] = [_onednn_layer(self.weights) for _ in range(sets)]
        self.unit = unit
        if unit is not None:
            o, gate_up, down = self.weights
            norm, rooms = torch.ones(hidden, dtype=BF16), Rooms()
            self.candidates[self.ours] = [
                PostAttention(o, norm, gate_up, down, EPS, rooms, unit) for _ in range(sets)
            ]

    @property
    def ours(self) -> str:
        """The name of the candidate that is not oneDNN."""
        return "amx" if self.unit is None or self.unit.tiles else "avx512_bf16"

    @property
    def has_tiles(self) -> bool:
        return self.unit is not None and self.unit.tiles and self.unit.native

    def inputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """Attention's output and the residual."""
        return torch.randn(rows, self.attn).to(BF16), torch.randn(rows, self.hidden).to(BF16)

    def exact(self, x: Tensor, residual: Tensor) -> Tensor:
        """The stage in float32 (float64 takes minutes)."""
        o, gate_up, down = (w.float() for w in self.weights)
        y = x.float() @ o.T + residual.float()
        gate, up = (F.rms_norm(y, y.shape[1:], eps=EPS) @ gate_up.T).chunk(2, 1)
        return (F.silu(gate) * up) @ down.T + y

    def runs(self, x: Tensor, residual: Tensor) -> dict[str, Callable[[], Tensor]]:
        """One call a candidate, which takes the next set each time."""
        return {
            name: partial(_next_layer, itertools.cycle(layers), x, residual)
            for name, layers in self.candidates.items()
        }


def dense_table(
    case: DenseCase, rows_list: tuple[int, ...], threads: int, bandwidth: float, repeats: int
) -> list[dict[str, Any]]:
    """Records of all candidates; bandwidth in bytes/s."""
    sets = len(case.candidates["onednn"])
    print(f"\ndense after attention, hidden {case.hidden}, {sets} sets of weights, bf16; medians")
    print("rows candidate       ms     best  TFLOP/s  of the peak  weights GB/s  of read    error")
    records = []
    spinner = TileSpinner(threads) if case.has_tiles else None
    for rows in rows_list:
        x, residual = case.inputs(rows)
        runs = case.runs(x, residual)
        exact = case.exact(x, residual) if rows <= 64 else None
        times = in_turns(runs, repeats)
        for name, layers in case.candidates.items():
            seconds, error = median(times[name]), 0.0
            if exact is not None:
                error = float((layers[0](x, residual).float() - exact).norm() / exact.norm())
            flops = rows * case.bytes  # two operations a weight of two bytes
            record = {
                "rows": rows,
                "candidate": name,
                "ms": round(seconds * 1e3, 3),
                "best_ms": round(min(times[name]) * 1e3, 3),
                "tflop_s": round(flops / seconds / 1e12, 3),
                "of_peak": spinner and _shares(runs[name], flops, spinner, repeats),
                "gb_s": round(case.bytes / seconds / GB, 1),
                "of_read": round(case.bytes / seconds / bandwidth, 3),
                "right": error < 0.01,
            }
            records.append(record)
            print(_line(record, error), flush=True)
    return records


def _shares(
    run: Callable[[], Any], flops: int, spinner: TileSpinner, repeats: int
) -> dict[str, float]:
    """Quartiles of what a call makes of the tile unit's rate around it, and that rate's median."""
    pairs = beside(run, spinner.run, 3 * repeats)
    low, middle, high = quantiles([flops / s * p / spinner.flops for s, p in pairs])
    peak = spinner.flops / median(p for _, p in pairs)
    return {"low": low, "median": middle, "high": high, "peak_tflop_s": peak / 1e12}


def _line(record: dict[str, Any], error: float) -> str:
    share, text = record["of_peak"], ""
    if share:
        text = f"{share['median']:.0%} ({share['low']:.0%}-{share['high']:.0%})"
    return (
        f"{record['rows']:4} {record['candidate']:11}{record['ms']:9.3f} {record['best_ms']:8.3f} "
        f"{record['tflop_s']:8.3f} {text:>13} {record['gb_s']:12.1f} "
        f"{record['of_read']:8.0%} {error:8.1e}"
    )


def _next_layer(turns: Iterator[Layer], x: Tensor, residual: Tensor) -> Tensor:
    return next(turns)(x, residual)


def _onednn_layer(weights: list[Tensor]) -> Layer:
    o, gate_up, down = (packed.pack(w) for w in weights)
    sizes = [w.shape[0] for w in weights]
    norm = torch.ones(sizes[0], dtype=BF16)

    def run(x: Tensor, residual: Tensor) -> Tensor:
        x = packed.packed_linear(x, o, sizes[0]) + residual
        normal = torch.empty_like(x)
        norm_rows(x, norm, EPS, normal)
        gate, up = packed.packed_linear(normal, gate_up, sizes[1]).chunk(2, 1)
        return packed.packed_linear(F.silu(gate) * up, down, sizes[2]) + x

    return run
