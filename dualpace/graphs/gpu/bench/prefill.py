"""Prompts: one alone until its token is on the host, and batches; where their time goes."""

from __future__ import annotations

import itertools
import statistics
import time

import torch

from dualpace.graphs.gpu.bench.setting import CUDA, PROMPT, Bench, random_pages


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
