"""One rank of several GPUs: right against one GPU, and what each stage gains.

Every rank runs the whole model as well, on its own, so that both are timed in the same minute and
compared on every rank. Few rows are added up by NCCL and by peer_sums.py. Results go to the folder
after each part, so that a run cut short has shown what it did.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualpace.graphs.collective import TorchCollective
from dualpace.graphs.gpu import attention, fused, kv, tune
from dualpace.graphs.gpu.attention import Heads, PagedRows
from dualpace.graphs.gpu.bench.setting import device_weights, error_of, timed
from dualpace.graphs.gpu.capture import Capturer, DecodeBatch, DecodeGraphs
from dualpace.graphs.gpu.forward import Forward, Rows
from dualpace.graphs.gpu.peer_sums import PeerSums
from dualpace.graphs.load import load_weights
from dualpace.graphs.rope import rope_table
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.shard import WHOLE, Shard
from dualpace.graphs.source import Source
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.weights import Weights

ROWS = (1, 8, 64, 256)  # of a decode step
PROMPT = 2048
CONTEXT = 1024
TUNED = (1, 64)
CHECKED_LAYERS, CHECKED_ROWS, CHECKED_STEPS = 2, 16, 12
_RANKS_TIMEOUT_S = 240.0


class RankBench:
    """What one rank has measured, and how it talks to the others."""

    def __init__(self, rank: int, size: int, folder: Path, options: dict[str, str]) -> None:
        self.rank, self.size, self.folder, self.options = rank, size, folder, options
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.collective = TorchCollective.join(
            "nccl", rank, size, folder / "meeting", _RANKS_TIMEOUT_S, self.device
        )
        self.shard = Shard(rank, size)
        self.spec = SHAPES[options.get("model", "llama-3.1-8b")]
        self.spec = dataclasses.replace(
            self.spec, num_layers=int(options.get("layers", self.spec.num_layers))
        )
        self.capturer = Capturer(self.device)
        self.result: dict[str, Any] = {}
        self.checked: dict[str, tuple[Tensor, Tensor]] = {}  # tokens and logits by form and dtype

    def note(self, key: str, value: object, tell: bool = True) -> None:
        """Keep a result, on disk too; rank 0 also tells it."""
        self.result[key] = value
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(self.result))
        if tell and self.rank == 0:
            print(f"{key}: {value}", flush=True)

    def run(self) -> None:
        sections = {
            f.__name__: f
            for f in (
                correctness,
                stages_library,
                correctness_of_peers,
                sums,
                stages_peers,
                stages_tuned,
            )
        }
        for name in self.options.get("sections", ",".join(sections)).split(","):
            began = time.perf_counter()
            try:
                sections[name](self)
            except Exception:  # the other sections are worth their device time
                self.note(f"{name}_failed", traceback.format_exc())
            torch.cuda.synchronize()
            self.note(f"{name}_s", round(time.perf_counter() - began, 1))


@dataclasses.dataclass
class Model:
    """The whole model or a rank's part, with a pool and captured decode steps."""

    bench: RankBench
    forward: Forward
    num_blocks: int

    def __post_init__(self) -> None:
        spec, forward = self.forward.spec, self.forward
        self.heads = Heads(spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
        choice = attention.choose(forward.dtype, "auto")
        self.maker = attention.make(choice, self.heads, forward.dtype, forward.device)
        self.pool = kv.make_pool(
            spec.num_layers,
            self.num_blocks,
            self.heads.kv,
            self.heads.dim,
            forward.dtype,
            str(forward.device),
        )
        self.caches = list(self.pool.unbind(0))
        self.sampled = torch.zeros(512, dtype=torch.int32, device=forward.device)

    def rows(self, count: int) -> Rows:
        forward = self.forward
        rows = Rows.empty(forward.spec, count, forward.dtype, forward.device)
        for tensor in (rows.x, rows.h, rows.q, rows.k, rows.v, rows.attn, rows.act):
            tensor.normal_()
        return rows


FORMS = ("alone", "nccl", "peers")  # one GPU; several, with either way to add up few rows


def make_forward(bench: RankBench, spec: ModelSpec, weights: Weights, form: str) -> Forward:
    cos, sin = (t.to(bench.device) for t in rope_table(spec, 4096))
    if form == "alone":
        return Forward(spec, weights, cos, sin, PROMPT)
    peers = None
    if form == "peers":
        peers = PeerSums.join(bench.collective, spec.hidden, weights.embed.dtype, bench.device)
        assert peers is not None, "GPUs cannot read each other's memory"
    shard, collective = bench.shard, bench.collective
    return Forward(spec, weights, cos, sin, PROMPT, shard=shard, collective=collective, peers=peers)


def shard_of(bench: RankBench, form: str) -> Shard:
    return WHOLE if form == "alone" else bench.shard


# ---- right?


def correctness(bench: RankBench) -> None:
    """Greedy and sampled decode steps, captured: one GPU, and several with NCCL."""
    check(bench, "alone")
    check(bench, "nccl")


def correctness_of_peers(bench: RankBench) -> None:
    check(bench, "peers")


def check(bench: RankBench, form: str) -> None:
    """Tokens and logits against those of one GPU in float32; the ranks' tokens among each other."""
    spec = dataclasses.replace(bench.spec, num_layers=min(CHECKED_LAYERS, bench.spec.num_layers))
    source = Source("random", None, spec, "random")
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_weights(source, dtype, 0, shard_of(bench, form), bench.device)
        model = Model(bench, make_forward(bench, spec, weights, form), 64)
        key = f"{form} {str(dtype).removeprefix('torch.')}"
        tokens, logits = bench.checked[key] = decode_some(bench, model)
        wanted = bench.checked["alone float32"]
        every = bench.collective.all_gather(tokens.to(bench.device))
        every = every.view(CHECKED_STEPS, bench.size, -1)
        errors[dtype] = error = error_of(logits, wanted[1])
        same, alike = (tokens == wanted[0]).float().mean(), bool((every == every[:, :1]).all())
        found = {"logits_error": error, "tokens_same": float(same), "same_on_all_ranks": alike}
        bench.note(f"checked {key}", found)
        assert alike, "ranks differ"
        if dtype == torch.float32:
            assert same > 0.99 and error < 1e-4, "float32 differs"
        del weights, model
        torch.cuda.empty_cache()
    alone = error_of(bench.checked["alone bfloat16"][1], bench.checked["alone float32"][1])
    assert errors[torch.bfloat16] < 1.5 * alone, "bf16 is worse"


def decode_some(bench: RankBench, model: Model) -> tuple[Tensor, Tensor]:
    """(tokens [steps, rows] of a captured step repeated, logits after the first step)."""
    count, steps = CHECKED_ROWS, CHECKED_STEPS
    forward = model.forward
    rows = Rows.empty(forward.spec, count, forward.dtype, bench.device)
    graphs = DecodeGraphs(
        forward,
        model.caches,
        model.maker.decode(count, 64),
        rows,
        model.sampled,
        bench.capturer,
    )
    first = None
    tokens = []
    random = np.random.default_rng(0)
    zeros = np.zeros(count, np.float32)
    for step in range(steps):
        greedy = step % 2 == 0
        batch = DecodeBatch(
            np.arange(100, 100 + count, dtype=np.int64),
            (np.arange(count) if step else np.full(count, -1)).astype(np.int32),
            np.full(count, step, np.int64),
            np.arange(1, count + 1, dtype=np.int64) * 16 + step,
            PagedRows.of([[row + 1] for row in range(count)], [step + 1] * count),
            zeros if greedy else zeros + 0.8,
            # Among all of a random model's tokens, which are about equally likely, the smallest
            # difference decides a draw.
            (np.arange(count) % 3 * 20 + 20).astype(np.int32),
            (1 - np.arange(count) % 2 * 0.1).astype(np.float32),
            random.random(count, np.float32),
        )
        graphs.begin(batch)
        graphs.whole()
        if first is None:
            first = forward.logits(rows.h).clone()
        tokens.append(graphs.post_layer().tokens.clone())
    torch.cuda.synchronize()
    assert first is not None
    return torch.stack(tokens).cpu(), first.cpu()


# ---- fast?


def sums(bench: RankBench) -> None:
    """Microseconds of one sum over ranks of so many rows in bf16, captured: NCCL's alone, and with
    the norm that follows it, in one kernel or two.
    """
    repeats, hidden = 32, bench.spec.hidden
    found: dict[int, dict[str, float]] = {}
    peers = PeerSums.join(bench.collective, hidden, torch.bfloat16, bench.device)
    assert peers is not None, "GPUs cannot read each other's memory"
    for count in (*ROWS, PROMPT):
        x, h = torch.zeros(2, count, hidden, device=bench.device).bfloat16().unbind(0)
        parts = torch.zeros(1, count, hidden, device=bench.device).bfloat16()
        weight = torch.ones(hidden, device=bench.device).bfloat16()

        def nccl(parts: Tensor = parts) -> None:
            for _ in range(repeats):
                bench.collective.all_reduce(parts[0])

        def nccl_norm(
            parts: Tensor = parts, x: Tensor = x, h: Tensor = h, weight: Tensor = weight
        ) -> None:
            for _ in range(repeats):
                bench.collective.all_reduce(parts[0])
                fused.add_norm(parts, x, weight, h, 1e-5)

        def peers_norm(
            parts: Tensor = parts, x: Tensor = x, h: Tensor = h, weight: Tensor = weight
        ) -> None:
            for turn in range(repeats):
                peers.add_norm(parts, x, weight, h, 1e-5, turn % 2)

        entry = found[count] = {}
        ways: dict[str, Callable[[], None]] = {"nccl": nccl, "nccl_norm": nccl_norm}
        if count <= peers.max_rows:
            ways["peers_norm"] = peers_norm
        for name, run in ways.items():
            bench.capturer.warm_up(run)
            us = timed(bench.capturer.capture(run).replay) / repeats * 1e3
            entry[name] = round(us, 1)
        bench.note("sums_us", found)


def stages_library(bench: RankBench) -> None:
    """Stages with the library's products, which need no tuning, and NCCL's sums."""
    stages(bench, "stages_library_ms", FORMS[:2])


def stages_peers(bench: RankBench) -> None:
    """The same with peer sums."""
    stages(bench, "stages_library_ms", FORMS[2:])


def stages_tuned(bench: RankBench) -> None:
    """Stages with the products that tuning chooses."""
    stages(bench, "stages_tuned_ms", FORMS, tuned=True)


def stages(bench: RankBench, key: str, forms: Sequence[str], tuned: bool = False) -> None:
    """Milliseconds of every stage over all layers, by rows, stage and form."""
    times = bench.result.get(key, {})
    for form in forms:
        weights = device_weights(shard_of(bench, form).local(bench.spec), bench.device)
        forward = make_forward(bench, bench.spec, weights, form)
        if tuned:
            choose(bench, forward, form)
        model = Model(bench, forward, 1 + ROWS[-1] * (CONTEXT // 16 + 1))
        for count in ROWS if form == "peers" else (*ROWS, PROMPT):
            for stage, ms in stage_times(bench, model, count).items():
                entry = times.setdefault(str(count), {}).setdefault(stage, {})
                entry[form] = round(ms, 3)
                if "alone" in entry and form != "alone":
                    entry[f"gain_{form}"] = round(entry["alone"] / ms, 2)
            bench.note(key, times, tell=False)
        del weights, forward, model
        torch.cuda.empty_cache()


def choose(bench: RankBench, forward: Forward, form: str) -> None:
    """The table of products, which one rank measures and the others read."""
    measures = 0 if form == "alone" else bench.size - 1
    processes = int(bench.options.get("processes", 12))
    if bench.rank == measures:
        tune.tune(forward, TUNED, bench.folder, processes)
    bench.collective.barrier()
    torch.cuda.synchronize()
    tune.tune(forward, TUNED, bench.folder, processes)
    for (product, rows), how in list(forward.choices.table.items()):
        if rows == TUNED[-1]:
            forward.choices.table[(product, 8)] = how


def stage_times(bench: RankBench, model: Model, count: int) -> dict[str, float]:
    forward, rows, layers = model.forward, model.rows(count), range(model.forward.spec.num_layers)
    positions = torch.zeros(count, dtype=torch.int64, device=bench.device)
    slots = torch.full((count,), -1, dtype=torch.int64, device=bench.device)
    ids, source = torch.zeros_like(positions), torch.full_like(positions, -1).int()
    chains: dict[str, list[Callable[[], object]]] = {
        "embedding": [partial(forward.embed, rows, ids, source, model.sampled)],
        "pre_attention": [
            partial(forward.pre_attention, i, rows, positions, model.caches[i], slots)
            for i in layers
        ],
        "post_attention": [partial(forward.post_attention, i, rows) for i in layers],
    }
    if count <= ROWS[-1]:
        decode = model.maker.decode(count, model.num_blocks + count)
        width = CONTEXT // 16
        tables = [list(range(1 + i * width, 1 + (i + 1) * width)) for i in range(count)]
        decode.plan(PagedRows.of(tables, [CONTEXT] * count))
        out = rows.attn.view_as(rows.q)
        chains["attention"] = [partial(decode.run, rows.q, cache, out) for cache in model.caches]
        chains["head"] = [partial(forward.greedy, rows.h, model.sampled[:count])]
        order = [chains["embedding"][0]]
        for pre, attend, post in zip(
            chains["pre_attention"], chains["attention"], chains["post_attention"], strict=True
        ):
            order += [pre, attend, post]
        chains["step"] = [*order, *chains["head"]]
    found = {}
    for name, calls in chains.items():

        def run(calls: list[Callable[[], object]] = calls) -> None:
            for call in calls:
                call()

        bench.capturer.warm_up(run)
        found[name] = timed(bench.capturer.capture(run).replay)
    return found


@torch.inference_mode()
def main(options: dict[str, str]) -> None:
    """A rank's life: options rank, size and folder, and those of the bench."""
    bench = RankBench(int(options["rank"]), int(options["size"]), Path(options["folder"]), options)
    bench.run()
    bench.collective.barrier()
    sys.stdout.flush()
    os._exit(0)  # NCCL waits for graphs that hold its sums, and nothing here is worth waiting for
