"""A measured profile as the simulator's cost model: tables where there are measurements, and what
is left of the rooflines derived from the same points."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

import numpy as np

from dualpace.graphs.spec import ModelSpec
from dualpace.runtime.assist import AssistKind
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.result import Choices, Result, of_kind
from dualpace.runtime.simulate.config import (
    AssistProfileConfig,
    CpuProfileConfig,
    GpuProfileConfig,
    HostProfileConfig,
    LimitsConfig,
    LinkProfileConfig,
    ProfileConfig,
    ShapeConfig,
    TableConfig,
)
from dualpace.runtime.simulate.cost import BF16

Points = dict[float, float]  # size -> ms
FLOOR_MS = 1e-4  # what noise may not push a derived time below
FP16_SHARE = 0.5  # of our kernel's rate, for one that widens fp16: as the H200 machine showed
HOST_ROUND_MS = 0.5  # not measured by a sweep: Python between two rounds


def simulated(
    name: str, results: Sequence[Result], choices: Choices, spec: ModelSpec, plan: Plan
) -> ProfileConfig:
    """The cost model of this machine; `plan` says what its pools hold."""
    route, copies = of_kind(results, "route"), of_kind(results, "copies")
    on_device = plan.gpu.device != "cpu"  # there, prompts are measured with the head of one row
    head_ms = head_at(route)[float(min(route))] if on_device else 0.0
    pair_ms, dense = prefill_model(of_kind(results, "prefill"), plan_layers(results), head_ms)
    tables = {
        **cpu_tables(route, of_kind(results, "decode")),
        **gpu_tables(results, dense, spec),
        **assist_tables(route),
    }
    return ProfileConfig(
        name=name,
        shape=ShapeConfig(
            num_layers=spec.num_layers,
            hidden=spec.hidden,
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate,
            vocab=spec.vocab,
        ),
        gpu=GpuProfileConfig(
            memory_gb_s=1.0,  # the tables hold
            memory_efficiency=1.0,
            attention_efficiency=1.0,
            tflops=float(4 * spec.q_size / max(pair_ms, 1e-9) / 1e9),
            gemm_efficiency=1.0,
            prefill_attention_efficiency=1.0,
        ),
        cpu=CpuProfileConfig(
            memory_gb_s=host_rate(of_kind(results, "decode"), spec),
            weight_efficiency=1.0,
            attention_efficiency=1.0,
            fp16_attention_efficiency=FP16_SHARE,
            tflops=1.0,  # the tables hold
        ),
        link=link(copies, route, spec),
        assist=assist(choices, results, beside=on_device and plan.assist.mode == "stream"),
        host=HostProfileConfig(gpu_round_ms=HOST_ROUND_MS, cpu_round_ms=HOST_ROUND_MS),
        limits=LimitsConfig(
            gpu_blocks=plan.kv.gpu_blocks,
            host_blocks=plan.kv.host_blocks,
            post_attention_limit=choices.routing.chosen[0],
            post_layer_limit=choices.routing.chosen[1],
        ),
        tables=tables,
    )


def as_yaml(profile: ProfileConfig) -> dict[str, Any]:
    """For a file of the group `simulated`."""
    return {"defaults": ["simulated_schema", "_self_"], **asdict(profile)}


def plan_layers(results: Sequence[Result]) -> int:
    """Layers that the points ran."""
    return int(results[0]["layers"])


def cpu_tables(route: Mapping[int, Any], decode: Mapping[int, Any]) -> dict[str, TableConfig]:
    stages = {
        f"cpu_{stage}": table({b: v["samples"][stage]["ms"] for b, v in route.items()})
        for stage in ("pre_attention", "post_attention", "post_layer")
    }
    attention = means(
        (batch * point["context"], point["attention"]["ms"])
        for batch, value in decode.items()
        for point in value["contexts"]
    )
    return {**stages, "cpu_attention": table(attention)}


def host_rate(decode: Mapping[int, Any], spec: ModelSpec) -> float:
    """GB/s at which the CPU's attention read KV at best, at the simulator's bytes a token."""
    token_bytes = 2 * spec.kv_size * BF16
    tokens_per_ms: float = max(
        batch * point["context"] / point["attention"]["ms"]
        for batch, value in decode.items()
        for point in value["contexts"]
    )
    return tokens_per_ms * token_bytes / 1e6


def gpu_tables(results: Sequence[Result], dense: Points, spec: ModelSpec) -> dict[str, TableConfig]:
    """Post-attention and post-layer as the assists ran them; pre-attention is what a decode step of
    short contexts leaves; attention what longer contexts add; many rows, which take no less than
    few, from the prompts."""
    route, steps, layers = of_kind(results, "route"), of_kind(results, "step"), plan_layers(results)
    post: Points = {b: v["assists"]["POST_ATTENTION"]["parts"]["compute"] for b, v in route.items()}
    final = head_at(route)
    pre: Points = {}
    attention: list[tuple[float, float]] = []
    for batch, value in steps.items():
        contexts = sorted((c["context"], c["ms"]) for c in value["contexts"])
        shortest, base = contexts[0]
        rest = (base - at(final, batch)) / layers - at(post, batch)
        pre[batch] = max(rest, FLOOR_MS)
        attention += [(batch * (c - shortest), (ms - base) / layers) for c, ms in contexts[1:]]
    pre = least(pre)
    share, known, few = post_share(spec), max(post), max(pre.values())
    for tokens, ms in sorted(dense.items()):
        if tokens > known:
            post[tokens] = ms * share
        if tokens > max(steps):
            rest = ms - at(post, tokens) if tokens <= known else ms * (1 - share)
            pre[tokens] = max(rest, few)
    return {
        "gpu_pre_attention": table(pre),
        "gpu_post_attention": table(post),
        "gpu_post_layer": table(final),
        "gpu_decode_attention": table(means(attention)),
    }


def head_at(route: Mapping[int, Any]) -> Points:
    """ms of the post-layer on the device, by rows: as it is behind a post-attention, where its
    launches are hidden as in a step."""
    last = {b: value["assists"]["POST_ATTENTION_FINAL"] for b, value in route.items()}
    return {float(b): found["parts"]["sampling"] for b, found in last.items()}


def assist_tables(route: Mapping[int, Any]) -> dict[str, TableConfig]:
    """The device's interval of each kind of assist, by rows, with nothing beside it."""
    names = {
        AssistKind.POST_ATTENTION: "assist_post_attention",
        AssistKind.POST_ATTENTION_FINAL: "assist_final",
        AssistKind.POST_LAYER: "assist_post_layer",
    }
    return {
        name: table({float(b): v["assists"][kind.name]["ms"] for b, v in route.items()})
        for kind, name in names.items()
    }


def prefill_model(values: Mapping[int, Any], layers: int, head_ms: float) -> tuple[float, Points]:
    """One layer's attention, ms a pair of tokens, and the rest of a layer, ms by tokens.

    Shapes of equally many tokens differ in their pairs alone: the slope over all such groups is the
    first, by least squares. What it leaves is the second, of each group the least.
    """
    shapes: dict[int, list[tuple[float, float]]] = defaultdict(list)  # tokens -> (pairs, ms)
    for batch, value in values.items():
        for shape in value["lengths"]:
            n, ms = shape["length"], (shape["ms"] - head_ms) / layers
            shapes[batch * n].append((batch * n * (n + 1) / 2, ms))
    above = covariance = 0.0
    for group in shapes.values():
        mean_pairs, mean_ms = (fmean(column) for column in zip(*group, strict=True))
        above += sum((pairs - mean_pairs) ** 2 for pairs, _ in group)
        covariance += sum((pairs - mean_pairs) * (ms - mean_ms) for pairs, ms in group)
    pair = max(covariance / above, 0.0) if above else 0.0
    return pair, {
        float(tokens): max(min(ms - pair * pairs for pairs, ms in group), FLOOR_MS)
        for tokens, group in shapes.items()
    }


def post_share(spec: ModelSpec) -> float:
    """Post-attention's part of a layer's weights, and so of its time at many rows."""
    pre = spec.hidden * (spec.q_size + 2 * spec.kv_size)
    post = spec.q_size * spec.hidden + 3 * spec.hidden * spec.intermediate
    return post / (pre + post)


def link(copies: Mapping[int, Any], route: Mapping[int, Any], spec: ModelSpec) -> LinkProfileConfig:
    """Rate of swaps, or of an assist's rows where that is higher: a model of few layers has small
    blocks, whose copies take their start rather than their bytes. The latency is an assist's."""
    swaps = fmean(
        value["bytes"] / value[name]["ms"]
        for value in copies.values()
        for name in ("swap_out", "swap_in")
    )
    parts = {b: value["assists"]["POST_ATTENTION"]["parts"] for b, value in route.items()}
    largest = max(parts)
    moved = largest * (2 * spec.hidden + spec.q_size) * BF16
    rows = moved / max(parts[largest]["h2d"] + parts[largest]["d2h"], FLOOR_MS)
    latency_ms = min(part["h2d"] for part in parts.values())
    return LinkProfileConfig(gb_s=max(swaps, rows) / 1e6, latency_us=1e3 * float(latency_ms))


def assist(choices: Choices, results: Sequence[Result], *, beside: bool) -> AssistProfileConfig:
    """The simulator counts launch and finalize once in the wait and once as disturbance; `beside`:
    this machine serves assists beside the main batch."""
    route = of_kind(results, "route")
    samples = [value["samples"] for value in route.values()]
    buffer_ms = fmean(s["write"]["ms"] + s["read"]["ms"] for s in samples)
    parts = [kind["parts"] for value in route.values() for kind in value["assists"].values()]
    found = AssistProfileConfig(
        launch_ms=fmean(part["launch"] for part in parts),
        finalize_ms=fmean(part["finalize"] for part in parts),
        buffer_us=1e3 * buffer_ms,
    )
    if not beside:
        calls = [call for value in route.values() for call in value["calls"]]
        found.launch_ms = fmean(call["launch"] for call in calls)
        found.finalize_ms = fmean(call["finalize"] for call in calls)
        return found
    found.beside_wait_ms = choices.routing.calibration.wait[AssistKind.POST_ATTENTION]
    found.beside_stretch = stretch(route)
    measured = [value["loss"] for value in of_kind(results, "beside").values()]
    found.beside_loss = fmean(measured) if measured else alone_share(route) / found.beside_stretch
    return found


def stretch(route: Mapping[int, Any]) -> float:
    """How much longer an assist keeps the device beside decode steps; each kind and size alike."""
    return fmean(
        fmean(call["device"] for call in value["calls"] if call["kind"] == kind)
        / value["assists"][kind.name]["ms"]
        for value in route.values()
        for kind in AssistKind
    )


def alone_share(route: Mapping[int, Any]) -> float:
    """Kernels' part of an assist's interval on an idle device: what it takes from decode steps, if
    they lose just what it reads. Holds where no point has measured the loss."""
    assists = [value["assists"]["POST_ATTENTION"] for value in route.values()]
    return fmean(found["parts"]["compute"] / found["ms"] for found in assists)


def means(pairs: Any) -> Points:
    """Mean ms by size, ascending."""
    found: dict[float, list[float]] = {}
    for size, ms in pairs:
        found.setdefault(float(size), []).append(float(ms))
    return {size: fmean(found[size]) for size in sorted(found)}


def at(points: Points, size: float) -> float:
    return float(np.interp(size, sorted(points), [points[key] for key in sorted(points)]))


def least(points: Points) -> Points:
    """Times never fall with size, and noise only adds: none is above that of a larger size."""
    x = sorted(points)
    ms = [max(points[size], FLOOR_MS) for size in reversed(x)]
    return dict(zip(x, reversed(list(accumulate(ms, min))), strict=True))


def table(points: Points) -> TableConfig:
    x = sorted(points)
    if len(x) == 1:  # a table is a curve: one point says that size does not matter
        x, points = [x[0], 2 * x[0]], {x[0]: points[x[0]], 2 * x[0]: points[x[0]]}
    assert all(a < b for a, b in pairwise(x))
    ms = least(points).values()
    return TableConfig([float(size) for size in x], [round(float(m), 6) for m in ms])
