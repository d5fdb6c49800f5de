"""Decode steps: whole, by segments and by stage, against the byte floor and vLLM's figures."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualpace.graphs.cache import GraphCache
from dualpace.graphs.gpu import tune, tune_attention
from dualpace.graphs.gpu.attention import PagedRows
from dualpace.graphs.gpu.bench.setting import (
    BATCHES,
    CONTEXT,
    CUDA,
    STEPS,
    VLLM_MS,
    Bench,
    random_pages,
    timed,
)
from dualpace.graphs.gpu.capture import DecodeBatch, DecodeGraphs, DecodeInputs, LinearGraphs
from dualpace.graphs.sampling import SamplingRows


def products(bench: Bench) -> None:
    """The table of products: candidates compiled and timed, or read from disk."""
    began = time.perf_counter()
    folder = Path(bench.options["cache"]) if "cache" in bench.options else None
    lines: list[str] = []
    processes = int(bench.options.get("processes", 14))
    choices = tune.tune(bench.forward, BATCHES, folder, processes, lines.append)
    bench.note("tune_s", round(time.perf_counter() - began, 1))
    for line in lines:
        print("   ", line)
    for (product, rows), times in choices.times.items():
        best = sorted(times.items(), key=lambda item: item[1])[:4]
        shown = "; ".join(f"{how} {ms * 1e3:.1f}" for how, ms in best)
        print(f"    {product} {rows}: library {times['None'] * 1e3:.1f} us; {shown}")
    table = {f"{p}@{r}": str(how) for (p, r), how in choices.table.items()}
    bench.note("choices", table)


def attention_cuts(bench: Bench) -> None:
    """The table of decode attention, which the sections after this one then use."""
    if bench.choice.name != "flashinfer":
        return
    began = time.perf_counter()
    folder = Path(bench.options["cache"]) if "cache" in bench.options else None
    processes = int(bench.options.get("processes", 14))
    found = tune_attention.tuned(
        bench.maker, bench.heads, torch.bfloat16, CUDA, BATCHES[-1], folder, processes
    )
    bench.note("tune_attention_s", round(time.perf_counter() - began, 1))
    for rows, times in found.table.times.items():
        shown = "; ".join(
            f"{cut} {ms * 1e3:.1f}" for cut, ms in sorted(times.items(), key=lambda item: item[1])
        )
        print(f"    attention {rows}, us a layer: {shown}")
    bench.note("attention_choices", {rows: str(cut) for rows, cut in found.table.cuts.items()})
    bench.maker = found


def decode_steps(bench: Bench) -> None:
    """The captured step in both forms, planned anew every step, tokens read one step late."""
    forms = {
        "span_1": (1, False),
        "span_2": (2, False),
        "span_4": (4, False),
        "launches": (1, True),
    }
    table = {}
    for batch in BATCHES:
        steps = make_steps(batch)
        decode, rows = bench.decode(batch), bench.rows.first(batch)
        times: dict[str, Any] = {}
        for name, (span, as_launches) in forms.items():
            began = time.perf_counter()
            try:
                graphs = DecodeGraphs(
                    bench.forward,
                    bench.caches,
                    decode,
                    rows,
                    bench.sampled,
                    bench.capturer,
                    whole=span == 1,
                    span=span,
                    as_launches=as_launches,
                )
                capture_s = time.perf_counter() - began
                if "whole" not in times:
                    times["whole"] = round(run_steps(bench, graphs, steps, segments=False), 3)
                    times["capture_s"] = round(capture_s, 2)
                    times |= host_times(graphs, steps[0])
                times[name] = round(run_steps(bench, graphs, steps, segments=True), 3)
                if as_launches:
                    times["launch_us"] = host_times(graphs, steps[0])["replay_us"]
            except Exception as error:
                times[name] = repr(error)
            graphs = None
        floor = sum(floors(bench, batch).values())
        whole = times["whole"]
        times |= {"vllm": VLLM_MS[batch], "vs_vllm": round(whole / VLLM_MS[batch], 3)}
        times |= {"floor": round(floor, 3), "vs_floor": round(whole / floor, 3)}
        bench.note(f"decode_{batch}", times)
        table[batch] = times
    bench.result["decode"] = table


def make_steps(batch: int) -> list[DecodeBatch]:
    """Batches whose contexts grow by one token a step, around CONTEXT in the mean."""
    first = CONTEXT - STEPS // 2
    _, tables = random_pages([first + STEPS] * batch)
    zeros = np.zeros(batch, np.float32)
    steps = []
    for step in range(STEPS):
        length = first + step
        slots = np.array([t[(length - 1) // 16] * 16 + (length - 1) % 16 for t in tables])
        source = np.arange(batch) if step else np.full(batch, -1)
        steps.append(
            DecodeBatch(
                np.full(batch, 17, np.int64),
                source.astype(np.int32),
                np.full(batch, length - 1, np.int64),
                slots.astype(np.int64),
                PagedRows.of(tables, [length] * batch),
                zeros,
                zeros.astype(np.int32),
                zeros + 1,
                zeros,
            )
        )
    return steps


def run_steps(
    bench: Bench, graphs: DecodeGraphs, steps: list[DecodeBatch], segments: bool
) -> float:
    """Milliseconds between tokens as the host sees them; the median."""
    ends, read = [], torch.empty(2, 256, dtype=torch.int32, pin_memory=True)
    events = [torch.cuda.Event() for _ in steps]
    for i, step in enumerate(steps):
        graphs.begin(step)
        if segments:
            graphs.pre_layer()
            for index in range(graphs.num_segments):
                graphs.segment(index)
        else:
            graphs.whole()
        tokens = graphs.post_layer().tokens
        read[i % 2, : len(tokens)].copy_(tokens, non_blocking=True)
        events[i].record()
        if i:
            events[i - 1].synchronize()
            ends.append(time.perf_counter())
    torch.cuda.synchronize()
    return float(statistics.median(np.diff(ends)[3:])) * 1e3


def host_times(graphs: DecodeGraphs, step: DecodeBatch) -> dict[str, float]:
    """Microseconds of host time to plan a round and to replay one layer."""
    plans, replays, attention_plans = [], [], []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        graphs._decode.plan(step.paged)
        attention_plans.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        began = time.perf_counter()
        graphs.begin(step)
        planned = time.perf_counter()
        for index in range(8):
            graphs.segment(index)
        plans.append(planned - began)
        replays.append((time.perf_counter() - planned) / 8)
    torch.cuda.synchronize()
    median = statistics.median
    return {
        "attention_plan_us": round(median(attention_plans) * 1e6, 1),
        "plan_us": round(median(plans) * 1e6, 1),
        "replay_us": round(median(replays) * 1e6, 1),
    }


def floors(bench: Bench, batch: int) -> dict[str, float]:
    """Milliseconds to move each stage's bytes once, at the measured copy bandwidth."""
    w, spec = bench.forward.weights, bench.spec
    layer = w.layers[0]
    parts = {
        "pre": layer.qkv.nbytes * spec.num_layers,
        "attention": batch * CONTEXT * spec.kv_size * 2 * 2 * spec.num_layers,
        "post": (layer.o.nbytes + layer.gate_up.nbytes + layer.down.nbytes) * spec.num_layers,
        "head": w.head.nbytes,
    }
    return {name: count / bench.copy_rate * 1e3 for name, count in parts.items()}


def stage_sums(bench: Bench) -> None:
    """Each captured stage over all layers, alone: where a step's time goes."""
    layers = range(bench.spec.num_layers)
    for batch in BATCHES:
        rows = bench.rows.first(batch)
        decode = bench.decode(batch)
        decode.plan(random_pages([CONTEXT] * batch)[0])
        inputs = DecodeInputs(batch, bench.forward.device).views
        linear = LinearGraphs(
            bench.forward, bench.caches, rows, inputs, bench.sampled, bench.capturer
        )
        out = rows.attn.view_as(rows.q)

        def attend(decode=decode, rows=rows, out=out) -> None:
            for layer in layers:
                decode.run(rows.q, bench.caches[layer], out)

        bench.capturer.warm_up(attend)
        attended = bench.capturer.capture(attend)

        def greedy(rows=rows, batch=batch) -> None:
            bench.forward.greedy(rows.h, bench.sampled[:batch])

        bench.capturer.warm_up(greedy)
        head = bench.capturer.capture(greedy)
        chains = {
            "pre": lambda r=rows, v=inputs: [
                bench.forward.pre_attention(i, r, v["positions"], bench.caches[i], v["slots"])
                for i in layers
            ],
            "post": lambda r=rows: [bench.forward.post_attention(i, r) for i in layers],
        }
        times = {name: timed(bench.capturer.capture(f).replay) for name, f in chains.items()}
        times |= {"attention": timed(attended.replay), "head": timed(head.replay)}
        apart = timed(lambda g=linear: [g.first(), *(g.after(i) for i in layers)])
        floor = floors(bench, batch)
        shown = {name: f"{ms:.3f} ({ms / floor[name]:.2f}x)" for name, ms in times.items()}
        bench.note(
            f"stages_{batch}",
            {
                "sum_ms": round(sum(times.values()), 3),
                "sum_with_a_graph_a_piece_ms": round(apart + times["attention"] + times["head"], 3),
                **shown,
            },
        )


def inductor(bench: Bench) -> None:
    """The registry's `inductor` on this device: build time and one bucket's stages in a graph."""
    began = time.perf_counter()
    cache = GraphCache()
    built = cache.build(
        bench.spec, bench.forward.weights, device="cuda", backend="inductor", buckets=(64,)
    )
    bench.note("inductor_build_s", round(time.perf_counter() - began, 1))
    x = torch.randn(64, bench.spec.hidden, device=CUDA).bfloat16()
    attn = torch.randn(64, bench.spec.q_size, device=CUDA).bfloat16()
    positions = torch.arange(64, device=CUDA)
    layers = range(bench.spec.num_layers)
    stages_of = {
        "pre": lambda: [built.pre_attention(i, x, positions) for i in layers],
        "post": lambda: [built.post_attention(i, attn, x) for i in layers],
        "head": lambda: built.post_layer(x, SamplingRows.greedy(64, CUDA)),
    }
    times = {}
    for name, function in stages_of.items():
        bench.capturer.warm_up(function)
        times[name] = round(timed(bench.capturer.capture(function).replay), 3)
    bench.note("inductor_stages_64", times)
