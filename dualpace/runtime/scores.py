"""Route scores from measured primitives: Equations 6-8 and 11-15, a row a batch size, all in ms.

Shared by the profiler and the simulator; knows nothing about where the numbers come from.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from dualpace.runtime.assist import AssistKind
from dualpace.runtime.routing import Route


@dataclass(frozen=True, slots=True)
class Primitives:
    """What Appendix B measures at one CPU batch size (Equation 11 and the g_x below it)."""

    post_attention: float  # t_p: one layer's, on the CPU
    post_layer: float  # t_l: norm, head and sampling, on the CPU
    write: float  # a_w: residual and attention output into the assist buffer
    read: float  # a_r: the hidden state out of it
    write_final: float  # h_w: the final hidden state into it
    assist: Mapping[AssistKind, float]  # g_x: the device's interval, data movement included


@dataclass(frozen=True, slots=True)
class Calibration:
    """What serving adds to the device's interval, whatever the batch size (Equation 13)."""

    wait: Mapping[AssistKind, float]  # q_x: seen by the CPU worker
    overhead: Mapping[AssistKind, float]  # o_x: spent by the GPU worker


@dataclass(frozen=True, slots=True)
class AssistCall:
    """One assist of a calibration run, in ms."""

    kind: AssistKind
    rows: int  # u, its calibration group
    wait: float  # W: from publication until the CPU worker saw the result
    device: float  # G
    launch: float  # L
    finalize: float  # F


def calibrate(calls: Iterable[AssistCall]) -> Calibration:
    """Means over the groups' means, so that frequent batch sizes weigh no more (Equations 12-13).

    Raises ValueError where a kind of assist was never called.
    """
    groups: dict[AssistKind, dict[int, list[AssistCall]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        groups[call.kind][call.rows].append(call)
    missing = [kind.name for kind in AssistKind if kind not in groups]
    if missing:
        raise ValueError(f"no calibration call of kind {', '.join(missing)}")
    return Calibration(
        wait={
            kind: fmean(
                fmean(max(call.wait - call.device, 0.0) for call in group)
                for group in groups[kind].values()
            )
            for kind in AssistKind
        },
        overhead={
            kind: fmean(
                fmean(call.launch + call.finalize for call in group)
                for group in groups[kind].values()
            )
            for kind in AssistKind
        },
    )


def cpu_times(row: Primitives, calibration: Calibration, num_layers: int) -> dict[Route, float]:
    """T_r^CPU(b): Equation 7 with the waits of Equations 14 and 15."""

    def wait(kind: AssistKind) -> float:
        return calibration.wait[kind] + row.assist[kind]

    middle = row.write + wait(AssistKind.POST_ATTENTION) + row.read
    layers = num_layers * row.post_attention
    return {
        Route.FULL_CPU: layers + row.post_layer,
        Route.SPLIT_FINAL: layers + row.write_final + wait(AssistKind.POST_LAYER),
        Route.FUSED_ASSIST: (num_layers - 1) * middle
        + row.write
        + wait(AssistKind.POST_ATTENTION_FINAL),
    }


def gpu_times(row: Primitives, calibration: Calibration, num_layers: int) -> dict[Route, float]:
    """D_r^GPU(b): Equation 8 with the disturbances of Equation 14."""

    def disturbance(kind: AssistKind) -> float:
        return calibration.overhead[kind] + row.assist[kind]

    return {
        Route.FULL_CPU: 0.0,
        Route.SPLIT_FINAL: disturbance(AssistKind.POST_LAYER),
        Route.FUSED_ASSIST: (num_layers - 1) * disturbance(AssistKind.POST_ATTENTION)
        + disturbance(AssistKind.POST_ATTENTION_FINAL),
    }


def route_scores(
    rows: Sequence[Primitives],
    calibration: Calibration,
    num_layers: int,
    gpu_weight: float = 1.0,
) -> dict[Route, list[float]]:
    """S_r(b) = T_r + lambda * D_r in ms for each row (Equation 6); `gpu_weight` is lambda."""
    scores: dict[Route, list[float]] = {name: [] for name in Route}
    for row in rows:
        seen = cpu_times(row, calibration, num_layers)
        displaced = gpu_times(row, calibration, num_layers)
        for name in Route:
            scores[name].append(seen[name] + gpu_weight * displaced[name])
    return scores
