"""Checks and times the GPU library on this device: `python scripts/bench_gpu.py [key=value]`.

Llama-3.1-8B's shape with random weights. Correctness comes first; then decode steps in both forms
against the byte floor and vLLM's, prefill, swaps. Ends with one JSON line, also written to
`out=FILE`. Keys: out, cache (folder of measured tables), sections (comma-separated), layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import statistics
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from dualpace.graphs import sampling as reference_sampling
from dualpace.graphs import stages
from dualpace.graphs.attention import causal_prefill, paged_decode_reference
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.gpu import attention, kv, sampling, tune
from dualpace.graphs.gpu.attention import Choice, Heads, PagedRows
from dualpace.graphs.gpu.capture import Capturer, DecodeBatch, DecodeGraphs, PieceGraphs
from dualpace.graphs.gpu.forward import Forward, Rows
from dualpace.graphs.gpu.host_memory import HostMemory
from dualpace.graphs.rope import rope_table
from dualpace.graphs.sampling import SamplingRows
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.weights import Weights, layer_shapes, make_layer, make_weights, top_shapes

VLLM_MS = {1: 4.88, 8: 5.22, 32: 6.22, 64: 7.53, 128: 10.45, 256: 17.63}
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXT = 1024
STEPS = 40
PROMPT = 2048
MAX_ROWS = 8192
POOL_BLOCKS = 1 + 256 * 70
HOST_BLOCKS = 1024
CUDA = torch.device("cuda", 0)


class Bench:
    """One model, its pool, and what was measured so far."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self.result: dict[str, object] = {}
        shape = SHAPES["llama-3.1-8b"]
        self.spec = dataclasses.replace(shape, num_layers=int(options.get("layers", 32)))
        spec = self.spec
        self.heads = Heads(spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
        weights = device_weights(spec)
        cos, sin = (t.to(CUDA) for t in rope_table(spec, 16384))
        self.forward = Forward(spec, weights, cos, sin, MAX_ROWS)
        self.pool = kv.make_pool(
            spec.num_layers, POOL_BLOCKS, self.heads.kv, self.heads.dim, torch.bfloat16, "cuda"
        )
        for layer in self.pool:
            layer.normal_()
        self.caches = list(self.pool.unbind(0))
        self.choice = attention.choose(torch.bfloat16, options.get("attention", "auto"))
        self.maker = attention.make(self.choice, self.heads, torch.bfloat16, CUDA)
        self.rows = Rows.empty(spec, MAX_ROWS, torch.bfloat16, CUDA)
        self.sampled = torch.zeros(512, dtype=torch.int32, device=CUDA)
        self.capturer = Capturer(CUDA)
        self.copy_rate = 0.0

    def note(self, key: str, value: object) -> None:
        self.result[key] = value
        print(f"{key}: {value}", flush=True)

    def decode(self, bucket: int) -> attention.Decode:
        return self.maker.decode(bucket, bucket * 70)


def device_weights(spec) -> Weights:
    """Random weights made on the device, scaled as a trained model's."""
    generator = torch.Generator(CUDA).manual_seed(0)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        out = torch.empty(shape, dtype=torch.bfloat16, device=CUDA)
        if name.endswith("norm"):
            return out.uniform_(0.5, 1.5, generator=generator)
        return out.normal_(0, shape[-1] ** -0.5, generator=generator)

    top = {name: make(name, shape) for name, shape in top_shapes(spec).items()}
    layers = [
        make_layer({name: make(name, shape) for name, shape in layer_shapes(spec).items()})
        for _ in range(spec.num_layers)
    ]
    return make_weights(top, layers)


def timed(function, repeats: int = 10, warm_ups: int = 3) -> float:
    """Median milliseconds on the device."""
    for _ in range(warm_ups):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


# ---- sections


def ceilings(bench: Bench) -> None:
    """Copy bandwidth on the device (bytes read plus written) and over the link."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=CUDA).random_()
    target = torch.empty_like(source)
    bench.copy_rate = 2 * source.nbytes / timed(lambda: target.copy_(source)) * 1e3
    bench.note("copy_TBs", round(bench.copy_rate / 1e12, 3))
    total = torch.zeros((), dtype=torch.float32, device=CUDA)
    words = source.view(torch.float32)
    read = timed(lambda: torch.sum(words, dim=0, out=total))
    bench.note("read_TBs", round(source.nbytes / read / 1e9, 3))


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


def correctness(bench: Bench) -> None:
    """bf16 against float32 references; what moves, bit by bit."""
    check_layer(bench)
    check_attention(bench)
    check_movement(bench)
    check_sampling(bench)


def check_layer(bench: Bench) -> None:
    spec, forward = bench.spec, bench.forward
    w, eps = forward.weights.layers[0], spec.rms_eps
    full = {f: getattr(w, f) for f in layer_shapes(spec)}
    full = {f: t.float() for f, t in full.items()}
    cos, sin = (t.to(CUDA) for t in rope_table(spec, 16384))
    heads = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
    errors = {}
    for bucket in BATCHES:
        lens = torch.randint(1, 1000, (bucket,)).tolist()
        paged, tables = random_pages(lens)
        rows = bench.rows.first(bucket)
        x = torch.randn(bucket, spec.hidden, device=CUDA).bfloat16()
        rows.x.copy_(x)
        forward.normed(rows, w.attn_norm)
        positions = torch.tensor(lens, device=CUDA) - 1
        slots = [t[(n - 1) // 16] * 16 + (n - 1) % 16 for t, n in zip(tables, lens, strict=True)]
        cache = bench.caches[0]
        forward.pre_attention(0, rows, positions, cache, torch.tensor(slots, device=CUDA))
        decode = bench.decode(bucket)
        decode.plan(paged)
        decode.run(rows.q, cache, rows.attn.view_as(rows.q))
        q, k, v = stages.pre_attention(
            x.float(),
            positions,
            cos,
            sin,
            full["attn_norm"],
            full["qkv"],
            None,
            None,
            None,
            heads=heads,
            eps=eps,
        )
        block, offset = torch.tensor(slots, device=CUDA) // 16, torch.tensor(slots) % 16
        stored = cache[block, :, :, offset.to(CUDA)]
        assert torch.equal(stored[:, 0], rows.k) and torch.equal(stored[:, 1], rows.v)
        widest = max(len(t) for t in tables)
        padded = torch.tensor([t + [0] * (widest - len(t)) for t in tables], device=CUDA)
        mine = cache.float()
        mine[block, 0, :, offset.to(CUDA)] = k
        mine[block, 1, :, offset.to(CUDA)] = v
        attn = paged_decode_reference(q, mine, padded, torch.tensor(lens), spec.head_dim**-0.5)
        wanted = stages.post_attention(
            attn.flatten(1),
            x.float(),
            full["o"],
            full["mlp_norm"],
            full["gate_up"],
            full["down"],
            intermediate=spec.intermediate,
            eps=eps,
        )
        forward.post_attention(0, rows)
        errors[bucket] = round(error_of(rows.x, wanted), 5)
        del mine
    bench.note("layer_error_vs_float32", errors)
    assert max(errors.values()) < 1e-2


def random_pages(lens: list[int], bucket: int = 0) -> tuple[PagedRows, list[list[int]]]:
    """Scattered blocks for each row, none twice."""
    counts = [-(-n // 16) for n in lens]
    ids = (torch.randperm(POOL_BLOCKS - 1)[: sum(counts)] + 1).tolist()
    starts = np.cumsum([0, *counts])
    tables = [ids[a:b] for a, b in itertools.pairwise(starts)]
    return PagedRows.of(tables, lens, bucket), tables


def check_attention(bench: Bench) -> None:
    heads, cache = bench.heads, bench.caches[-1]
    errors = {}
    for name in dict.fromkeys((bench.choice.name, "triton")):
        maker = attention.make(Choice(name, ""), heads, torch.bfloat16, CUDA)
        for lens in ([1], [1, 16, 17, 1000], [5, 4097] * 4):
            paged, tables = random_pages(lens, bucket=8)
            q = torch.randn(8, heads.query, heads.dim, device=CUDA).bfloat16()
            out = torch.full_like(q, torch.nan)
            decode = maker.decode(8, 4096)
            decode.plan(PagedRows.idle(8))
            decode.plan(paged)
            decode.run(q, cache, out)
            widest = max(len(t) for t in tables)
            padded = [t + [0] * (widest - len(t)) for t in [*tables, *[[0]] * (8 - len(lens))]]
            padded = torch.tensor(padded, device=CUDA)
            scale = heads.dim**-0.5
            wanted = paged_decode_reference(
                q.float(), cache.float(), padded, paged.context_lens(), scale
            )
            errors[f"{name} decode {lens}"] = round(error_of(out, wanted), 5)
        q, k, v = (
            torch.randn(700, n, heads.dim, device=CUDA).bfloat16()
            for n in (heads.query, heads.kv, heads.kv)
        )
        wanted = causal_prefill(q.float(), k.float(), v.float(), [300, 400])
        prefill = maker.prefill()
        prefill.plan([300, 400])
        errors[f"{name} prefill"] = round(error_of(run_prefill(prefill, q, k, v), wanted), 5)
        paged, tables = random_pages([300, 400])
        place = [t[i // 16] * 16 + i % 16 for t in tables for i in range(16 * len(t))]
        place = [*place[:300], *place[304 : 304 + 400]]
        kv.append(k, v, cache, torch.tensor(place, device=CUDA))
        later = torch.cat((q[200:300], q[550:700]))
        prefill.plan([100, 150], paged)
        chunks = (torch.cat((t[200:300], t[550:])) for t in (k, v))
        got = run_prefill(prefill, later, *chunks, cache)
        wanted = torch.cat((wanted[200:300], wanted[550:700]))
        errors[f"{name} later chunk"] = round(error_of(got, wanted), 5)
    bench.note("attention_error_vs_float32", errors)
    assert max(errors.values()) < 1e-2


def run_prefill(prefill, q, k, v, cache=None) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    prefill.run(q, k, v, out, cache)
    return out


def check_movement(bench: Bench) -> None:
    blocks = torch.randperm(POOL_BLOCKS - 1)[:40].add(1)
    ids = blocks.int().to(CUDA)
    staging = torch.empty(40, *bench.pool[:, 0].shape, dtype=torch.bfloat16, device=CUDA)
    kv.gather(bench.pool, ids, staging)
    assert torch.equal(staging, bench.pool[:, ids.long()].transpose(0, 1)), "gather"
    before = bench.pool[:, ids.long()].clone()
    kv.scatter(staging.flip(0), ids, bench.pool)
    assert torch.equal(bench.pool[:, ids.long()], before.flip(1)), "scatter"
    bench.note("movement", "bit exact")


def check_sampling(bench: Bench) -> None:
    vocab = bench.spec.vocab
    for rows in (3, 64):
        logits = 3 * torch.randn(rows, vocab, device=CUDA)
        temperature = torch.tensor([0.0, 0.8, 1.0] * rows)[:rows]
        top_k = torch.tensor([0, 50, 0] * rows, dtype=torch.int32)[:rows]
        top_p = torch.tensor([1.0, 1.0, 0.9] * rows)[:rows]
        u = torch.rand(rows)
        made = SamplingRows.of(temperature, top_k, top_p, u)
        made = SamplingRows(*(t.to(CUDA) for t in (temperature, top_k, top_p, u)))
        tokens = torch.empty(rows, dtype=torch.int32, device=CUDA)
        sampling.sample(logits, made, tokens)
        wanted = reference_sampling.sample(logits, made)
        same = float((tokens == wanted).float().mean())
        took = timed(lambda a=logits, b=made, c=tokens: sampling.sample(a, b, c))
        greedy = torch.empty_like(tokens)
        sampling.argmax(logits, greedy)
        assert torch.equal(greedy, logits.argmax(-1).int())
        bench.note(f"sampling_{rows}_rows", {"same": round(same, 3), "us": round(took * 1e3, 1)})
        assert same > 0.95
    heads = {}
    for rows in BATCHES:
        h = torch.randn(rows, bench.spec.hidden, device=CUDA).bfloat16()
        tokens = torch.empty(rows, dtype=torch.int32, device=CUDA)
        bench.forward.greedy(h, tokens)
        wanted = (h.float() @ bench.forward.weights.head.float().t()).argmax(-1)
        heads[rows] = round(float((tokens == wanted).float().mean()), 3)
    bench.note("greedy_same_as_float32", heads)
    assert min(heads.values()) > 0.95


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
        times: dict[str, object] = {}
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
        tokens = graphs.post_layer()
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


def stage_sums(bench: Bench) -> None:
    """Each captured stage over all layers, alone: where a step's time goes."""
    layers = range(bench.spec.num_layers)
    for batch in BATCHES:
        rows = bench.rows.first(batch)
        decode = bench.decode(batch)
        decode.plan(random_pages([CONTEXT] * batch)[0])
        pieces = PieceGraphs(bench.forward, bench.caches, rows, bench.capturer)
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
            "pre": lambda r=rows, p=pieces: [
                bench.forward.pre_attention(i, r, p.positions, bench.caches[i], p.slots)
                for i in layers
            ],
            "post": lambda r=rows: [bench.forward.post_attention(i, r) for i in layers],
        }
        times = {name: timed(bench.capturer.capture(f).replay) for name, f in chains.items()}
        times |= {"attention": timed(attended.replay), "head": timed(head.replay)}
        apart = [timed(lambda f=f: [f(i) for i in layers]) for f in (pieces.pre, pieces.post)]
        floor = floors(bench, batch)
        shown = {name: f"{ms:.3f} ({ms / floor[name]:.2f}x)" for name, ms in times.items()}
        bench.note(
            f"stages_{batch}",
            {
                "sum_ms": round(sum(times.values()), 3),
                "sum_with_a_graph_a_piece_ms": round(
                    sum(apart) + times["attention"] + times["head"], 3
                ),
                **shown,
            },
        )


def prefill(bench: Bench) -> None:
    """One prompt alone until its token is on the host, and full batches."""
    backends = ("fa2", "fa3") if bench.choice.name == "flashinfer" else (None,)
    for prompts, backend in itertools.product((1, 4), backends):
        tokens = prompts * PROMPT
        _, tables = random_pages([PROMPT] * prompts)
        rows = bench.rows.first(tokens)
        ids = torch.randint(0, bench.spec.vocab, (tokens,), device=CUDA)
        source = torch.full((tokens,), -1, dtype=torch.int32, device=CUDA)
        positions = torch.arange(PROMPT, device=CUDA).repeat(prompts)
        slots = [t[i // 16] * 16 + i % 16 for t in tables for i in range(PROMPT)]
        slots = torch.tensor(slots, device=CUDA)
        last = torch.arange(1, prompts + 1, device=CUDA) * PROMPT - 1
        attend = bench.maker.prefill(backend) if backend else bench.maker.prefill()

        def run(
            rows=rows,
            ids=ids,
            source=source,
            positions=positions,
            slots=slots,
            last=last,
            attend=attend,
            prompts=prompts,
        ) -> list[int]:
            forward = bench.forward
            attend.plan([PROMPT] * prompts)
            forward.embed(rows, ids, source, bench.sampled)
            for layer, cache in enumerate(bench.caches):
                forward.pre_attention(layer, rows, positions, cache, slots)
                attend.run(rows.q, rows.k, rows.v, rows.attn.view_as(rows.q))
                forward.post_attention(layer, rows)
            forward.greedy(rows.h[last], bench.sampled[:prompts])
            return bench.sampled[:prompts].tolist()

        run()
        times = []
        for _ in range(8):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
        ms = statistics.median(times)
        rate = round(tokens / ms * 1e3)
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            run()
        entries = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:8]
        for e in entries:
            print(f"    {e.device_time_total / 1e3:8.2f} ms {e.count:5d} x {e.key[:90]}")
        bench.note(
            f"prefill_{prompts}x{PROMPT}_{backend}", {"ms": round(ms, 2), "tokens_per_s": rate}
        )


def swaps(bench: Bench) -> None:
    """Registration, swap and write-out rates against a plain copy from registered memory."""
    shape = (HOST_BLOCKS, *bench.pool[:, 0].shape)
    count = int(np.prod(shape)) * 2
    host = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.bfloat16).view(shape)
    began = time.perf_counter()
    memory = HostMemory(host, host[0].nbytes)
    seconds = time.perf_counter() - began
    bench.note("register_s_per_GiB", round(seconds / (count / 2**30), 3))
    large = torch.empty(256, *shape[1:], dtype=torch.bfloat16, device=CUDA)
    down = timed(lambda: host[:256].copy_(large, non_blocking=True), 5, 2)
    up = timed(lambda: large.copy_(host[:256], non_blocking=True), 5, 2)
    ceiling = {"out": large.nbytes / down / 1e6, "in": large.nbytes / up / 1e6}
    bench.note("link_GBs", {k: round(v, 1) for k, v in ceiling.items()})
    mover = kv.BlockMover(bench.pool, host)
    for blocks in (32, 64, 256):
        hbm = (torch.randperm(POOL_BLOCKS - 1)[:blocks] + 1).tolist()
        targets = (torch.randperm(HOST_BLOCKS - 1)[:blocks] + 1).tolist()
        moved = blocks * host[0].nbytes
        out = timed(lambda h=hbm, t=targets: mover.swap_out(h, t), 5, 2)
        dma = timed(lambda h=hbm, t=targets: mover.swap_out_by_dma(h, t), 5, 2)
        back = timed(lambda h=hbm, t=targets: mover.swap_in(t, h), 5, 2)
        rates = {"out": out, "out_dma": dma, "in": back}
        rates = {k: moved / ms / 1e6 for k, ms in rates.items()}
        shown = {k: f"{v:.1f} GB/s ({v / ceiling[k.split('_')[0]]:.2f})" for k, v in rates.items()}
        bench.note(f"swap_{blocks}_blocks", shown)
        assert torch.equal(host[targets[0]], bench.pool[:, hbm[0]].cpu()), "swap"
    k, v = (torch.randn(PROMPT, *bench.rows.k.shape[1:], device=CUDA).bfloat16() for _ in range(2))
    blocks = torch.randperm(HOST_BLOCKS - 1)[: PROMPT // 16].add(1).int().to(CUDA)
    for programs in (8, 16, 32):

        def write(programs=programs) -> None:
            for layer in range(4):
                kv.write_out(k, v, host, layer, blocks, programs)

        rate = 4 * 2 * k.nbytes / timed(write, 5, 2) / 1e6
        shown = f"{rate:.1f} GB/s ({rate / ceiling['out']:.2f})"
        bench.note(f"write_out_{programs}_programs", shown)
    torch.cuda.synchronize()
    stored = host[blocks.cpu().long(), 1].transpose(2, 3)
    assert torch.equal(stored[:, 0].flatten(0, 1), k.cpu()), "write-out"
    assert torch.equal(stored[:, 1].flatten(0, 1), v.cpu()), "write-out"
    memory.close()


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


SECTIONS = {
    function.__name__: function
    for function in (
        ceilings,
        products,
        correctness,
        decode_steps,
        stage_sums,
        prefill,
        swaps,
        inductor,
    )
}


@torch.inference_mode()
def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    began = time.perf_counter()
    bench = Bench(options)
    bench.note("device", torch.cuda.get_device_name(CUDA))
    bench.note("attention", f"{bench.choice.name}: {bench.choice.reason}")
    bench.note("setup_s", round(time.perf_counter() - began, 1))
    failed = []
    for name in options.get("sections", ",".join(SECTIONS)).split(","):
        began = time.perf_counter()
        try:
            SECTIONS[name](bench)
        except Exception:  # the other sections are worth their device time
            traceback.print_exc()
            failed.append(name)
        torch.cuda.synchronize()
        print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)
    bench.note("failed", failed)
    line = json.dumps(bench.result, default=str)
    if "out" in options:
        Path(options["out"]).write_text(line + "\n")
    print(line)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
