"""A measured profile as the simulator's cost model: tables where there are measurements, and what
is left of the rooflines derived from the same points."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression, nnls

from dualpace.graphs.spec import ModelSpec
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
    prefill = prefill_model(of_kind(results, "prefill"), plan_layers(results))
    q_width = spec.q_size
    pair_ms = prefill["pair"]
    tables = {
        **cpu_tables(route, of_kind(results, "decode")),
        **gpu_tables(results, prefill, spec),
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
            tflops=float(4 * q_width / max(pair_ms, 1e-9) / 1e9),
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
        link=link(copies, route),
        assist=assist(choices, route),
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


def gpu_tables(
    results: Sequence[Result], prefill: Mapping[str, Any], spec: ModelSpec
) -> dict[str, TableConfig]:
    """Post-attention and post-layer as the assists ran them; pre-attention is what a decode step of
    short contexts leaves; attention what longer contexts add; many rows from the prompts."""
    route, steps, layers = of_kind(results, "route"), of_kind(results, "step"), plan_layers(results)
    post: Points = {b: v["assists"]["POST_ATTENTION"]["parts"]["compute"] for b, v in route.items()}
    final: Points = {b: v["assists"]["POST_LAYER"]["parts"]["sampling"] for b, v in route.items()}
    pre: Points = {}
    attention: list[tuple[float, float]] = []
    for batch, value in steps.items():
        contexts = sorted((c["context"], c["ms"]) for c in value["contexts"])
        shortest, base = contexts[0]
        rest = (base - at(final, batch)) / layers - at(post, batch)
        pre[batch] = max(rest, FLOOR_MS)
        attention += [(batch * (c - shortest), (ms - base) / layers) for c, ms in contexts[1:]]
    share = post_share(spec)
    for tokens, ms in prefill["dense"].items():
        if tokens > max(post):
            post[tokens] = ms * share
        if tokens > max(steps):
            pre[tokens] = ms * (1 - share)
    return {
        "gpu_pre_attention": table(pre),
        "gpu_post_attention": table(post),
        "gpu_post_layer": table(final),
        "gpu_decode_attention": table(means(attention)),
    }


def prefill_model(values: Mapping[int, Any], layers: int) -> dict[str, Any]:
    """`pair`: ms of one layer's attention a pair of tokens; `dense`: ms of the rest of a layer by
    tokens. By least squares over shapes: a layer takes a + b * tokens + pair * pairs."""
    shapes = [
        (batch, shape["length"], shape["ms"] / layers)
        for batch, value in values.items()
        for shape in value["lengths"]
    ]
    matrix = [[1.0, b * n, b * n * (n + 1) / 2] for b, n, _ in shapes]
    weights = np.array([1.0 / ms for *_, ms in shapes])  # relative errors count
    found, _ = nnls(np.array(matrix) * weights[:, None], np.ones(len(shapes)))
    pair = float(found[2])
    dense = means((b * n, max(ms - pair * b * n * (n + 1) / 2, FLOOR_MS)) for b, n, ms in shapes)
    return {"pair": pair, "dense": dense}


def post_share(spec: ModelSpec) -> float:
    """Post-attention's part of a layer's weights, and so of its time at many rows."""
    pre = spec.hidden * (spec.q_size + 2 * spec.kv_size)
    post = spec.q_size * spec.hidden + 3 * spec.hidden * spec.intermediate
    return post / (pre + post)


def link(copies: Mapping[int, Any], route: Mapping[int, Any]) -> LinkProfileConfig:
    """Rate of swaps; the latency is a one-row assist's copy."""
    rates = [
        value["bytes"] / value[name]["ms"] / 1e6
        for value in copies.values()
        for name in ("swap_out", "swap_in")
    ]
    smallest = route[min(route)]["assists"]["POST_ATTENTION"]["parts"]["h2d"]
    return LinkProfileConfig(gb_s=float(fmean(rates)), latency_us=1e3 * float(smallest))


def assist(choices: Choices, route: Mapping[int, Any]) -> AssistProfileConfig:
    """The simulator counts launch and finalize once in the wait and once as disturbance."""
    samples = [value["samples"] for value in route.values()]
    buffer_ms = fmean(s["write"]["ms"] + s["read"]["ms"] for s in samples)
    calls = [call for value in route.values() for call in value["calls"]]
    return AssistProfileConfig(
        launch_ms=fmean(call["launch"] for call in calls),
        finalize_ms=fmean(call["finalize"] for call in calls),
        buffer_us=1e3 * buffer_ms,
    )


def means(pairs: Any) -> Points:
    """Mean ms by size, ascending."""
    found: dict[float, list[float]] = {}
    for size, ms in pairs:
        found.setdefault(float(size), []).append(float(ms))
    return {size: fmean(found[size]) for size in sorted(found)}


def at(points: Points, size: float) -> float:
    return float(np.interp(size, sorted(points), [points[key] for key in sorted(points)]))


def table(points: Points) -> TableConfig:
    """Times never fall with size: what noise says otherwise is levelled."""
    x = sorted(points)
    if len(x) == 1:  # a table is a curve: one point says that size does not matter
        x, points = [x[0], 2 * x[0]], {x[0]: points[x[0]], 2 * x[0]: points[x[0]]}
    ms = isotonic_regression([max(points[size], FLOOR_MS) for size in x], increasing=True).x
    assert all(a < b for a, b in pairwise(x))
    return TableConfig([float(size) for size in x], [round(float(m), 6) for m in ms])
