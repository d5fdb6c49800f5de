"""What all figures share: colours, panels, axes. Knows nothing of results."""

import re
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "dualpace"  # the same figure is the same file

# One colour and marker a policy in every figure (colour-blind safe).
STYLES: dict[str, tuple[str, str, str]] = {
    "dualpace": ("DualPace", "#0072B2", "o"),
    "neo": ("NEO", "#D55E00", "s"),
    "gpu_only": ("GPU only", "#009E73", "^"),
    "vllm": ("vLLM", "#CC79A7", "D"),
    "vllm_offload": ("vLLM, KV offload", "#E69F00", "v"),
    "llama_cpp": ("llama.cpp", "#56B4E9", "P"),
}
OTHER_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def line_order(name: str) -> tuple[int, list[float], str]:
    """Policies in their fixed order, then variants by the numbers in their names."""
    names = list(STYLES)
    known = names.index(name) if name in names else len(names)
    return known, [float(n) for n in re.findall(r"\d+", name)], name


def style(name: str, place: int = 0) -> tuple[str, str, str]:
    """(label, colour, marker) of a policy, or of a variant by its place among its kind."""
    return STYLES.get(name, (name, OTHER_COLOURS[place % len(OTHER_COLOURS)], "o"))


def grid(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(3.6 * columns + 0.3, height * rows + 0.4), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def finished(figure: Figure, axes: Sequence[Axes]) -> Figure:
    for axis in axes:
        axis.grid(color="0.92", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=7.5)
    return figure
