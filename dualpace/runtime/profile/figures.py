"""Figure 7 a-d and Figure 3 of the paper for the machine at hand. Knows choices and points only."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dualpace.runtime.bench.canvas import OTHER_COLOURS, finished, grid
from dualpace.runtime.profile.result import Choices, Result, of_kind
from dualpace.runtime.routing import Route

LABELS = {
    Route.FULL_CPU: "Full-CPU",
    Route.SPLIT_FINAL: "Split-Final",
    Route.FUSED_ASSIST: "Fused-Assist",
}
COLOURS = dict(zip(Route, OTHER_COLOURS, strict=False))
CPU_COLOUR, GPU_COLOUR = OTHER_COLOURS[1], OTHER_COLOURS[0]
MARKERS = "osv^DP"


def draw(choices: Choices, results: Sequence[Result], title: str, folder: Path) -> list[Path]:
    """Writes figure7 and figure3 as PNG and SVG; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in (
        ("figure7", figure_7(choices, title)),
        ("figure3", figure_3(results, title)),
    ):
        for suffix in ("png", "svg"):
            file = folder / f"{name}.{suffix}"
            figure.savefig(file, dpi=110, metadata={"Date": None} if suffix == "svg" else None)
            files.append(file)
    return files


def figure_7(choices: Choices, title: str) -> Figure:
    """The three decisions: (a) routes, (b) CPU batch, (c) and (d) GPU tokens."""
    figure, axes = grid(2, 2, 3.1)
    figure.set_size_inches(9.4, 6.6)
    routing_score(axes[0], choices)
    cpu_throughput(axes[1], choices)
    prefill_by_batch(axes[2], choices)
    prefill_by_tokens(axes[3], choices)
    figure.suptitle(title, fontsize=9)
    finished(figure, axes)
    axes[2].set_ylim(0, 1.35 * axes[2].get_ylim()[1])  # room for many lengths
    axes[2].legend(frameon=False, fontsize=7, ncols=4, loc="upper center")
    return figure


def routing_score(axis: Axes, choices: Choices) -> None:
    routing = choices.routing
    sizes = list(routing.table)
    for name in Route:
        values = [routing.table[size][name] for size in sizes]
        axis.plot(
            sizes, values, color=COLOURS[name], marker="o", markersize=3.5, label=LABELS[name]
        )
    p, f = routing.chosen
    reach = sizes[-1] * 1.1
    for low, high, name in (
        (0.8, f, Route.FULL_CPU),
        (max(f, 0.8), p, Route.SPLIT_FINAL),
        (max(p, 0.8), reach, Route.FUSED_ASSIST),
    ):
        if high > low:
            axis.axvspan(low, high, color=COLOURS[name], alpha=0.08, linewidth=0)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="Batch size (rows)",
        ylabel="Routing score (ms)",
        xlim=(0.8, reach),
    )
    plain_decades(axis.yaxis)
    axis.set_title(f"(a) Routing score; shaded: the route of (P, F) = ({p}, {f})", fontsize=8.5)
    plain_ticks(axis, sizes)


def cpu_throughput(axis: Axes, choices: Choices) -> None:
    contexts = sorted({context for _, context, _ in choices.cpu.grid})
    for place, context in enumerate(contexts):
        points = sorted((b, rate / 1e3) for b, c, rate in choices.cpu.grid if c == context)
        axis.plot(
            *zip(*points, strict=True),
            marker=MARKERS[place % len(MARKERS)],
            markersize=3.5,
            color=OTHER_COLOURS[place % len(OTHER_COLOURS)],
            label=f"context {context}",
        )
    axis.axvline(choices.cpu.limit, color="0.4", linestyle="--", linewidth=1)
    axis.set(xscale="log", xlabel="Batch size (rows)", ylabel="Thousand tokens/s", ylim=(0, None))
    axis.set_title(f"(b) CPU single-layer decode; chosen limit {choices.cpu.limit}", fontsize=8.5)
    plain_ticks(axis, sorted({b for b, *_ in choices.cpu.grid}))


def prefill_by_batch(axis: Axes, choices: Choices) -> None:
    lengths = sorted({length for _, length, _ in choices.tokens.shapes})
    for place, length in enumerate(lengths):
        points = sorted((b, rate / 1e3) for b, n, rate in choices.tokens.shapes if n == length)
        axis.plot(
            *zip(*points, strict=True),
            marker=MARKERS[place % len(MARKERS)],
            markersize=3.5,
            color=OTHER_COLOURS[place % len(OTHER_COLOURS)],
            linestyle="-" if place < len(OTHER_COLOURS) else ":",
            label=f"length {length}",
        )
    axis.set(
        xscale="log", xlabel="Prompts in the batch", ylabel="Thousand tokens/s", ylim=(0, None)
    )
    axis.set_title("(c) GPU single-layer prefill by batch", fontsize=8.5)
    plain_ticks(axis, sorted({b for b, *_ in choices.tokens.shapes}))


def prefill_by_tokens(axis: Axes, choices: Choices) -> None:
    tokens = choices.tokens
    sizes = list(tokens.means)
    axis.plot(
        sizes,
        [v / 1e3 for v in tokens.means.values()],
        "o",
        color=OTHER_COLOURS[4],
        markersize=4,
        label="mean",
    )
    axis.plot(
        sizes,
        [v / 1e3 for v in tokens.smooth.values()],
        color=OTHER_COLOURS[0],
        label="nondecreasing fit",
    )
    axis.axhline(tokens.plateau / 1e3, color="0.6", linestyle=":", linewidth=1, label="plateau")
    axis.axvline(tokens.limit, color="0.4", linestyle="--", linewidth=1)
    axis.set(xscale="log", xlabel="Tokens in the batch", ylabel="Thousand tokens/s", ylim=(0, None))
    axis.set_title(f"(d) GPU single-layer prefill; chosen limit {tokens.limit}", fontsize=8.5)
    plain_ticks(axis, sizes)


def figure_3(results: Sequence[Result], title: str) -> Figure:
    """One layer's decode attention by batch and context, and post-attention by rows."""
    figure, axes = grid(1, 2, 3.1)
    figure.set_size_inches(9.4, 3.7)
    attention(axes[0], results)
    dense(axes[1], results)
    figure.suptitle(title, fontsize=9)
    return finished(figure, axes)


def attention(axis: Axes, results: Sequence[Result]) -> None:
    """The CPU's kernel by itself; the GPU's as what longer contexts add to a decode step."""
    host = [
        (batch * point["context"], point["attention"]["ms"])
        for batch, value in of_kind(results, "decode").items()
        for point in value["contexts"]
    ]
    device = []
    for batch, value in of_kind(results, "step").items():
        contexts = sorted((c["context"], c["ms"]) for c in value["contexts"])
        shortest, base = contexts[0]
        device += [
            (batch * (context - shortest), (ms - base) / results[0]["layers"])
            for context, ms in contexts[1:]
        ]
    for points, name, colour in ((host, "CPU", CPU_COLOUR), (device, "GPU", GPU_COLOUR)):
        shown = sorted(point for point in points if point[1] > 0)
        if shown:
            axis.plot(
                *zip(*shown, strict=True),
                "o-",
                color=colour,
                markersize=3.5,
                label=name,
                linewidth=0.8,
            )
    axis.set(xscale="log", yscale="log", xlabel="KV tokens read", ylabel="ms a layer")
    plain_decades(axis.xaxis)
    plain_decades(axis.yaxis)
    axis.set_title("Decode attention", fontsize=8.5)


def dense(axis: Axes, results: Sequence[Result]) -> None:
    route = of_kind(results, "route")
    sizes = list(route)
    host = [v["samples"]["post_attention"]["ms"] for v in route.values()]
    device = [v["assists"]["POST_ATTENTION"]["parts"]["compute"] for v in route.values()]
    moved = [v["assists"]["POST_ATTENTION"]["ms"] for v in route.values()]
    axis.plot(sizes, host, "o-", color=CPU_COLOUR, markersize=3.5, label="CPU")
    axis.plot(sizes, device, "o-", color=GPU_COLOUR, markersize=3.5, label="GPU")
    axis.plot(sizes, moved, "o:", color=GPU_COLOUR, markersize=3, label="GPU with data movement")
    axis.set(xscale="log", yscale="log", xlabel="Rows", ylabel="ms a layer")
    plain_decades(axis.yaxis)
    axis.set_title("Post-attention (O projection and FFN)", fontsize=8.5)
    plain_ticks(axis, sizes)


def plain_ticks(axis: Axes, sizes: Sequence[int]) -> None:
    """The profiled sizes as labels, those that would touch their neighbour left out."""
    apart = max((sizes[-1] / sizes[0]) ** (1 / 11), 1.0)
    shown: list[int] = []
    for size in sizes:
        if not shown or size >= apart * shown[-1]:
            shown.append(size)
    axis.set_xticks(shown, [str(size) for size in shown])
    axis.xaxis.set_minor_locator(NullLocator())


def plain_decades(axis: Axis) -> None:
    """1, 2, 5, 10 in place of powers, on a logarithmic axis."""
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < 300 * low else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
