"""Figures about a run itself: the lengths of its requests (Figure 8) and where the time of its
Dense Assists went (Figure 12), from the records that results hold."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dualpace.runtime.bench.canvas import OTHER_COLOURS, finished, grid

_BINS = 40
# Names as `AssistDone` has them, and what people read. The wait for the device's turn is no work.
_HOST = {"launch": "launch", "finalize": "finalize"}
_DEVICE = {
    "h2d": "host to GPU",
    "compute": "stage",
    "sampling": "sampling",
    "d2h": "GPU to host",
}


def figure_8(results: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Prompt and output lengths of each workload, from its run with most requests."""
    longest: dict[str, Mapping[str, Any]] = {}
    for result in results:
        known = longest.get(result["workload"])
        if result.get("input_lens") and (
            known is None or len(result["input_lens"]) > len(known["input_lens"])
        ):
            longest[result["workload"]] = result
    if not longest:
        return None
    figure, axes = grid(1, len(longest), 2.9)
    for axis, (workload, result) in zip(axes, sorted(longest.items()), strict=True):
        _lengths(axis, result["input_lens"], "prompt", OTHER_COLOURS[0])
        _lengths(axis, result["output_lens"], "output", OTHER_COLOURS[1])
        axis.set(xlabel="Tokens", ylabel="Requests (%)", xscale="log")
        axis.set_title(f"{workload}, {len(result['input_lens'])} requests", fontsize=8)
    figure.suptitle("Lengths", fontsize=10)
    return finished(figure, axes)


def _lengths(axis: Axes, lengths: Sequence[int], name: str, colour: str) -> None:
    counts = np.array(lengths, np.float64)
    edges = np.geomspace(1, max(counts.max(), 2), _BINS)
    weights = np.full(len(counts), 100 / len(counts))
    label = f"{name}, mean {counts.mean():.0f}"
    axis.hist(counts, edges.tolist(), weights=weights, color=colour, alpha=0.6, label=label)
    axis.axvline(counts.mean(), color=colour, linestyle=":", linewidth=1)


def figure_12(results: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Left: shares of the GPU worker's own work and of the device's. Right: the device's parts.
    One bar a machine and workload, over all its runs with assists."""
    places: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for result in results:
        seconds = result.get("assist_seconds") or {}
        if result.get("assists") and sum(seconds.values()) > 0:
            place = places[f"{result['profile']}\n{result['workload']}"]
            place["assists"] += result["assists"]
            for part, spent in seconds.items():
                place[part] += spent
    if not places:
        return None
    figure, axes = grid(1, 2, 3.2)
    on_host = {name: sum(place[part] for part in _HOST) for name, place in places.items()}
    on_device = {name: sum(place[part] for part in _DEVICE) for name, place in places.items()}
    _shares(axes[0], {"host launch and finalize": on_host, "on the GPU": on_device})
    _shares(
        axes[1],
        {
            text: {name: place[part] for name, place in places.items()}
            for part, text in _DEVICE.items()
        },
    )
    axes[0].set_ylabel("Share of component time (%)")
    axes[1].set_ylabel("Share of GPU time (%)")
    for index, (name, place) in enumerate(places.items()):
        mean_us = 1e6 * (on_host[name] + on_device[name]) / place["assists"]
        axes[0].annotate(f"{mean_us:.0f} us each", (index, 101), ha="center", fontsize=7)
    figure.suptitle("A Dense Assist, part by part", fontsize=10)
    finished(figure, axes)
    for axis in axes:
        axis.legend(loc="upper center", ncol=2, frameon=False, fontsize=7.5)
    return figure


def _shares(axis: Axes, parts: Mapping[str, Mapping[str, float]]) -> None:
    """Stacked bars to 100 %: part -> bar -> amount."""
    bars = list(next(iter(parts.values())))
    totals = {bar: sum(amounts[bar] for amounts in parts.values()) or 1.0 for bar in bars}
    bottom = np.zeros(len(bars))
    for (name, amounts), colour in zip(parts.items(), OTHER_COLOURS, strict=False):
        share = np.array([100 * amounts[bar] / totals[bar] for bar in bars])
        drawn = axis.bar(bars, share, 0.5, bottom=bottom, color=colour, label=name)
        labels = [f"{s:.1f}" if s >= 4 else "" for s in share]
        axis.bar_label(drawn, labels, label_type="center", fontsize=7)
        bottom += share
    axis.set_ylim(0, 130)  # room for the legend
    axis.set_xlim(-0.6, len(bars) - 0.4)
    axis.set_yticks(range(0, 101, 20))
    axis.tick_params(axis="x", labelsize=7)
