"""Correctness on the device, before anything is timed: bf16 against float32, moves bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from dualpace.graphs import sampling as reference_sampling
from dualpace.graphs import stages
from dualpace.graphs.attention import causal_prefill, paged_decode_reference
from dualpace.graphs.gpu import attention, kv, sampling
from dualpace.graphs.gpu.attention import Choice, PagedRows, Prefill
from dualpace.graphs.gpu.bench.setting import (
    BATCHES,
    CUDA,
    POOL_BLOCKS,
    Bench,
    error_of,
    random_pages,
    timed,
)
from dualpace.graphs.rope import rope_table
from dualpace.graphs.sampling import SamplingRows
from dualpace.graphs.weights import layer_shapes


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


def run_prefill(
    prefill: Prefill, q: Tensor, k: Tensor, v: Tensor, cache: Tensor | None = None
) -> Tensor:
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
