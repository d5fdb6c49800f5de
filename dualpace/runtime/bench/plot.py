"""The paper's figures from result files of the simulator or the benchmark. Knows only their keys.

A result is a JSON object with `profile`, `workload`, `policy`, `variant` (a label for sensitivity
runs, or null), `rate`, the metrics of `bench.metrics`, and `timeline` for Figure 1. Figures are
drawn for what the results hold; a figure without data is left out.
"""

import functools
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dualpace.errors import ConfigError
from dualpace.runtime.bench.breakdown import figure_8, figure_12
from dualpace.runtime.bench.canvas import finished, grid, line_order, style
from dualpace.runtime.bench.config import PlotConfig
from dualpace.runtime.bench.metrics import sustainable_rate
from dualpace.runtime.bench.page import write_page
from dualpace.runtime.bench.results import Result, in_order, load_results
from dualpace.runtime.bench.sustain import table
from dualpace.settings.paths import file_name, folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Metric:
    """What an axis shows: the result's key, the factor to its unit, its label and the target."""

    key: str
    scale: float
    label: str
    target: float
    top: float


LATENCY = Metric(
    "mean_normalized_latency_s_per_token", 1.0, "Normalized latency (s/token)", 1.0, 2.0
)
TTFT = Metric("p99_ttft_ms", 1e-3, "P99 time to first token (s)", 5.0, 10.0)
ITL = Metric("p99_itl_ms", 1e-3, "P99 inter-token latency (s)", 1.5, 3.0)
TPOT = Metric("p99_tpot_ms", 1e-3, "P99 time per output token (s)", 1.5, 3.0)
TPOT_TIGHT = Metric("p99_tpot_ms", 1e-3, "P99 time per output token (s)", 1.0, 2.0)

OFFLOADING = ("dualpace", "neo")


def plot(config: PlotConfig) -> None:
    """Print the sustainable rates and draw the figures; stdout ends with one JSON object."""
    folder("out", config.out)
    file_name("page", config.page)
    results = in_order(load_results(config.results), config.profiles)
    files = draw(results, config.figures, Path(config.out), config.timeline_rate)
    print("\n".join(table(results)))
    made: dict[str, Any] = {"figures": [str(file) for file in files]}
    if config.page:
        made["page"] = str(Path(config.out) / config.page)
        write_page(results, files, Path(made["page"]), config.title)
    print(json.dumps(made))


def draw(
    results: Sequence[Result], figures: Sequence[int], out: Path, rate: float | None = None
) -> list[Path]:
    """Write each figure that has data as PNG and SVG; returns the files. `rate` is Figure 1's."""
    unknown = set(figures) - DRAWERS.keys()
    if unknown:
        asked, known = (", ".join(map(str, sorted(n))) for n in (unknown, DRAWERS))
        raise ConfigError(f"figures=[{asked}] cannot be drawn: choose of {known}.")
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for number in figures:
        figure = figure_1(results, rate) if number == 1 else DRAWERS[number](results)
        if figure is None:
            log.info("figure %d is left out: %s", number, why_not(number, results))
            continue
        for suffix in ("png", "svg"):
            file = out / f"figure{number}.{suffix}"
            figure.savefig(file, dpi=110, metadata={"Date": None} if suffix == "svg" else None)
            files.append(file)
    return files


# Figure 1


def figure_1(results: Sequence[Result], rate: float | None = None) -> Figure | None:
    """Tokens over time, CPU-resident tokens over time, P99 ITL by rate, on the first profile with
    timelines and its workload with most CPU-resident tokens. GPU only is in the first panel.
    ConfigError for a rate that has none."""
    plain = [r for r in results if r["variant"] is None]
    timed = [r for r in plain if r.get("timeline")]
    if not timed:
        return None
    profile = timed[0]["profile"]
    lead = max(
        (r for r in timed if r["profile"] == profile), key=lambda r: int(r["cpu_resident_tokens"])
    )
    workload = lead["workload"]
    there = [r for r in timed if same(r, profile, workload)]
    rates = sorted({float(r["rate"]) for r in there})  # "inf": all at once
    rate = rates[-1] if rate is None else rate
    if rate not in rates:
        raise ConfigError(
            f"timeline_rate={rate:g} has no timeline of {workload} on {profile}: choose of "
            f"{', '.join(f'{each:g}' for each in rates)}."
        )
    shown = [r for r in there if float(r["rate"]) == rate]
    figure, axes = grid(1, 3, 3.2)
    for result in shown:
        name, colour, _ = style(result["policy"])
        times = result["timeline"]
        line: dict[str, Any] = {"color": colour, "label": name}
        axes[0].plot(times["t"], [n / 1e3 for n in times["tokens"]], **line)
        if any(times["cpu_tokens"]) or result["policy"] in OFFLOADING:
            axes[1].plot(times["t"], [n / 1e3 for n in times["cpu_tokens"]], **line)
    hybrid = [r for r in shown if r["policy"] in OFFLOADING]
    mark_pauses(axes[1], hybrid)
    axes[0].set(xlabel="Time (s)", ylabel="Tokens generated (thousands)")
    axes[1].set(xlabel="Time (s)", ylabel="CPU-resident tokens (thousands)\nbars: pauses above 1 s")
    offloading = [r for r in plain if r["policy"] in OFFLOADING]
    curves(axes[2], [r for r in offloading if same(r, profile, workload)], ITL, "policy")
    words = f"{rate:g} requests/s" if math.isfinite(rate) else "all at once"
    figure.suptitle(f"{profile}, {workload}, {words} in the first two", fontsize=9)
    return finished(figure, axes)


def mark_pauses(axis: Axes, results: Sequence[Result]) -> None:
    """Bars below the curves: when host-resident requests were there and none advanced for 1 s."""
    top = axis.get_ylim()[1]
    for place, result in enumerate(results, 1):
        colour = style(result["policy"])[1]
        for start, end in result["timeline"].get("pauses", ()):
            axis.hlines(-0.035 * top * place, start, end, color=colour, linewidth=4)
    axis.set_ylim(-0.035 * top * (len(results) + 1), top)


def same(result: Result, profile: str, workload: str) -> bool:
    return bool(result["profile"] == profile and result["workload"] == workload)


# Rate sweeps


def sweeps(
    results: Sequence[Result], rows: Sequence[tuple[Metric, str]], title: str
) -> Figure | None:
    """One row a (metric, workload), one column a profile."""
    plain = [r for r in results if r["variant"] is None]
    profiles = list(dict.fromkeys(r["profile"] for r in plain))
    panels = [
        [[r for r in plain if same(r, profile, workload)] for profile in profiles]
        for _, workload in rows
    ]
    if not any(panel for row in panels for panel in row):
        return None
    kept = [i for i, row in enumerate(panels) if any(row)]
    figure, axes = grid(len(kept), len(profiles), 2.9)
    for at, i in enumerate(kept):
        metric, workload = rows[i]
        for column, profile in enumerate(profiles):
            axis = axes[at * len(profiles) + column]
            curves(axis, panels[i][column], metric, "policy")
            axis.set_title(f"{profile}, {workload}", fontsize=8)
    figure.suptitle(title, fontsize=10)
    return finished(figure, axes)


def sensitivity(results: Sequence[Result], metrics: Sequence[Metric], title: str) -> Figure | None:
    """One row a metric, one column a kind of variant, told by its first word: TP or host."""
    kinds = [[r for r in results if (r["variant"] or "").startswith(k)] for k in ("TP ", "host ")]
    groups = [group for group in kinds if group]
    if not groups:
        return None
    figure, axes = grid(len(metrics), len(groups), 2.9)
    for column, group in enumerate(groups):
        for row, metric in enumerate(metrics):
            curves(axes[row * len(groups) + column], group, metric, "variant")
    figure.suptitle(title, fontsize=10)
    return finished(figure, axes)


def curves(axis: Axes, results: Sequence[Result], metric: Metric, by: str) -> None:
    """A line for each value of `by`; dotted verticals mark where it meets the target (dashed)."""
    lines: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        lines[result[by]].append(result)
    for place, name in enumerate(sorted(lines, key=line_order)):
        points = sorted(lines[name], key=lambda r: float(r["rate"]))
        points = [r for r in points if math.isfinite(float(r["rate"]))]
        rates = [float(r["rate"]) for r in points]
        values = [r[metric.key] * metric.scale for r in points]
        label, colour, marker = style(name, place)
        axis.plot(rates, values, color=colour, marker=marker, markersize=3.5, label=label)
        crossing = sustainable_rate(rates, values, metric.target).rate
        if crossing is not None:
            axis.vlines(crossing, 0, metric.target, color=colour, linestyle=":", linewidth=1)
    axis.axhline(metric.target, color="0.5", linestyle="--", linewidth=0.8)
    highest = max((r[metric.key] * metric.scale for r in results), default=metric.top)
    # Where none reaches the target, its scale would show flat lines.
    top = metric.top if highest >= metric.target else 1.2 * highest
    axis.set(xlabel="Request rate (requests/s)", ylabel=metric.label, ylim=(0, top or None))


# By the paper's numbers: the rows of sweeps, and all that can be drawn.
ROWS: dict[int, tuple[list[tuple[Metric, str]], str]] = {
    9: (
        [(LATENCY, "conversation"), (LATENCY, "code")],
        "Normalized latency under increasing load",
    ),
    10: ([(TTFT, "conversation"), (ITL, "conversation")], "Tail latency under increasing load"),
    13: ([(TTFT, "code"), (ITL, "code")], "Tail latency under increasing load"),
    14: ([(TPOT, "conversation"), (TPOT, "code")], "P99 TPOT under increasing load"),
}
DRAWERS: dict[int, Callable[[Sequence[Result]], Figure | None]] = {
    1: figure_1,
    8: figure_8,
    11: lambda results: sensitivity(
        results, [LATENCY, TTFT, ITL], "Sensitivity to CPU tensor parallelism and host KV capacity"
    ),
    12: figure_12,
    15: lambda results: sensitivity(
        results, [TPOT_TIGHT], "P99 TPOT: CPU tensor parallelism and host KV capacity"
    ),
    **{number: functools.partial(sweeps, rows=rows, title=t) for number, (rows, t) in ROWS.items()},
}
_LABELLED = "none of them has a variant that begins with 'TP ' or 'host ': name it with variant="
_MISSING = {
    1: "none of them has a timeline and no variant",
    8: "none of them has its requests' lengths, which scripts/bench.py keeps",
    11: _LABELLED,
    12: "none of them has times of Dense Assists, which scripts/bench.py keeps where a GPU assists",
    15: _LABELLED,
}


def why_not(number: int, results: Sequence[Result]) -> str:
    """Why `results` hold nothing for a figure, and what would change that."""
    if number not in ROWS:
        return _MISSING[number]
    wanted = " or ".join(dict.fromkeys(workload for _, workload in ROWS[number][0]))
    plain = {str(r["workload"]) for r in results if r["variant"] is None}
    there = f"those of {', '.join(sorted(plain))}" if plain else "variants alone"
    return f"it shows the workload {wanted}, and these are {there}: name it with workload.label="
