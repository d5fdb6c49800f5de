"""The library on a real device: graphs replay what was run, plans in flight do not collide, blocks
move bit by bit through registered memory."""

import mmap

import numpy as np
import pytest
import torch

from dualpace.graphs import stages
from dualpace.graphs.attention import paged_decode_reference
from dualpace.graphs.gpu import attention, kv
from dualpace.graphs.gpu.attention import Choice, Heads, PagedRows
from dualpace.graphs.gpu.capture import Capturer, DecodeBatch, DecodeGraphs, LinearGraphs
from dualpace.graphs.gpu.forward import Forward, Rows
from dualpace.graphs.gpu.host_memory import HostMemory
from dualpace.graphs.gpu.launches import Launches
from dualpace.graphs.gpu.linear import Choices
from dualpace.graphs.gpu.skinny import Skinny
from dualpace.graphs.random_weights import random_weights
from dualpace.graphs.rope import rope_table
from dualpace.graphs.spec import ModelSpec

CUDA = torch.device("cuda")
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    hidden=512,
    num_layers=3,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    intermediate=1024,
    vocab=2048,
    max_context=512,
)
HEADS = Heads(8, 2, 128)
BUCKET = 8
CUTS = {
    "qkv": Skinny(32, 128, 3, 4, 2),
    "o": Skinny(64, 64, 3, 4, 4),
    "gate_up": Skinny(32, 64, 4, 4),
    "down": Skinny(64, 128, 3, 4, 2),
    "head": Skinny(64, 128, 3, 4),
}
KINDS = ["triton"]
if attention.choose(torch.bfloat16).name == "flashinfer":
    KINDS.append("flashinfer")


def make_forward(dtype: torch.dtype, cuts: dict[str, Skinny]) -> Forward:
    weights = random_weights(SPEC, dtype, seed=3, device=CUDA)
    cos, sin = (t.to(CUDA) for t in rope_table(SPEC, SPEC.max_context))
    choices = Choices({(product, BUCKET): how for product, how in cuts.items()})
    return Forward(SPEC, weights, cos, sin, 64, choices)


def make_graphs(
    forward: Forward, kind: str, span: int = 1, as_launches: bool = False
) -> tuple[DecodeGraphs, torch.Tensor]:
    pool = kv.make_pool(SPEC.num_layers, 128, 2, 128, forward.dtype, "cuda")
    decode = attention.make(Choice(kind, ""), HEADS, forward.dtype, CUDA).decode(BUCKET, 128)
    rows = Rows.empty(SPEC, BUCKET, forward.dtype, CUDA)
    sampled = torch.zeros(64, dtype=torch.int32, device=CUDA)
    graphs = DecodeGraphs(
        forward,
        list(pool),
        decode,
        rows,
        sampled,
        Capturer(CUDA),
        whole=True,
        span=span,
        as_launches=as_launches,
    )
    return graphs, pool


def batch_of(step: int, tables: list[list[int]], start: int, sampled: bool) -> DecodeBatch:
    count = len(tables)
    lengths = [start + step + row for row in range(count)]
    slots = [t[(n - 1) // 16] * 16 + (n - 1) % 16 for t, n in zip(tables, lengths, strict=True)]
    source = np.arange(count) if sampled else np.full(count, -1)
    zeros = np.zeros(count, np.float32)
    return DecodeBatch(
        np.arange(count, dtype=np.int64) + 5,
        source.astype(np.int32),
        np.array(lengths, np.int64) - 1,
        np.array(slots, np.int64),
        PagedRows.of(tables, lengths, BUCKET),
        zeros + (0.8 if step % 3 == 2 else 0.0),
        zeros.astype(np.int32),
        zeros + 0.9,
        zeros + 0.31,
    )


def generate(graphs: DecodeGraphs, pool: torch.Tensor, whole: bool, wait: bool) -> list[list[int]]:
    pool.normal_(generator=torch.Generator(CUDA).manual_seed(1))
    tables = [list(range(1 + 8 * row, 9 + 8 * row)) for row in range(5)]
    out = []
    for step in range(12):
        graphs.begin(batch_of(step, tables, 90, sampled=step > 0))
        if whole:
            graphs.whole()
        else:
            graphs.pre_layer()
            for index in range(graphs.num_segments):
                graphs.segment(index)
        out.append(graphs.post_layer().tokens[:5].clone())
        if wait:
            torch.cuda.synchronize()
    return [tokens.tolist() for tokens in out]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_replay_gives_the_same_tokens(kind: str) -> None:
    graphs, pool = make_graphs(make_forward(torch.bfloat16, CUTS), kind)
    expected = generate(graphs, pool, whole=True, wait=True)
    assert len({tuple(tokens) for tokens in expected}) > 6
    for whole, wait in ((False, True), (True, False), (False, False)):
        assert generate(graphs, pool, whole, wait) == expected
    for span, as_launches in ((2, False), (1, True)):
        graphs, pool = make_graphs(make_forward(torch.bfloat16, CUTS), kind, span, as_launches)
        assert generate(graphs, pool, whole=False, wait=False) == expected


@pytest.mark.parametrize("cuts", [{}, CUTS], ids=["library", "skinny"])
def test_a_layer_in_bf16_is_near_float32(cuts: dict[str, Skinny]) -> None:
    forward = make_forward(torch.bfloat16, cuts)
    full = random_weights(SPEC, torch.float32, seed=3, device=CUDA)
    rows = Rows.empty(SPEC, BUCKET, torch.bfloat16, CUDA)
    rows.x.normal_()
    rows.attn.normal_()
    x, w = rows.x.float(), forward.weights.layers[0]
    forward.normed(rows, w.attn_norm)
    positions = torch.arange(BUCKET, device=CUDA) * 60
    forward.pre_attention(0, rows, positions)
    cos, sin = (t.to(CUDA) for t in rope_table(SPEC, SPEC.max_context))
    layer = full.layers[0]
    norms = (layer.attn_norm, layer.qkv, None, None, None)
    q, k, v = stages.pre_attention(
        x, positions, cos, sin, *norms, heads=(8, 2, 128), eps=SPEC.rms_eps
    )
    for got, wanted in ((rows.q, q), (rows.k, k), (rows.v, v)):
        assert (got - wanted).norm() / wanted.norm() < 1e-2
    forward.post_attention(0, rows)
    wanted = stages.post_attention(
        rows.attn.float(),
        x,
        layer.o,
        layer.mlp_norm,
        layer.gate_up,
        layer.down,
        intermediate=SPEC.intermediate,
        eps=SPEC.rms_eps,
    )
    assert (rows.x - wanted).norm() / wanted.norm() < 1e-2


def test_float32_tokens_are_those_of_the_stages() -> None:
    forward = make_forward(torch.float32, {})
    graphs, pool = make_graphs(forward, "triton")
    tables = [list(range(1 + 8 * row, 9 + 8 * row)) for row in range(5)]
    pool.normal_()
    batch = batch_of(0, tables, 90, sampled=False)
    before = pool.clone()
    graphs.begin(batch)
    graphs.whole()
    got = graphs.post_layer().tokens[:5].tolist()
    positions = torch.from_numpy(batch.positions).to(CUDA)
    x = stages.pre_layer(torch.from_numpy(batch.token_ids).to(CUDA), forward.weights.embed)
    cos, sin = (t.to(CUDA) for t in rope_table(SPEC, SPEC.max_context))
    lengths = batch.paged.context_lens()[:5]
    for w, cache in zip(forward.weights.layers, before, strict=True):
        norms = (w.attn_norm, w.qkv, None, None, None)
        q, k, v = stages.pre_attention(
            x, positions, cos, sin, *norms, heads=(8, 2, 128), eps=SPEC.rms_eps
        )
        kv.append(k, v.contiguous(), cache, torch.from_numpy(batch.slots).to(CUDA))
        padded = torch.tensor(tables, device=CUDA)
        attn = paged_decode_reference(q, cache, padded, lengths, 128**-0.5)
        mlp = (w.o, w.mlp_norm, w.gate_up, w.down)
        x = stages.post_attention(
            attn.flatten(1), x, *mlp, intermediate=SPEC.intermediate, eps=SPEC.rms_eps
        )
    logits = stages.logits(
        x, forward.weights.final_norm, forward.weights.head, vocab=SPEC.vocab, eps=SPEC.rms_eps
    )
    assert got == logits.argmax(-1).tolist()


def test_dense_work_with_attention_between_is_the_layer() -> None:
    forward = make_forward(torch.bfloat16, CUTS)
    graphs, pool = make_graphs(forward, "triton")
    tables = [list(range(1 + 8 * row, 9 + 8 * row)) for row in range(8)]
    pool.normal_(generator=torch.Generator(CUDA).manual_seed(1))
    before = pool.clone()
    batch = batch_of(0, tables, 90, sampled=False)
    graphs.begin(batch)
    graphs.pre_layer()
    graphs.segment(0)
    expected = graphs._rows.x.clone()

    rows = Rows.empty(SPEC, BUCKET, torch.bfloat16, CUDA)
    views, sampled = graphs._inputs.views, graphs._sampled
    linear = LinearGraphs(forward, list(before), rows, views, sampled, Capturer(CUDA))
    decode = attention.make(Choice("triton", ""), HEADS, torch.bfloat16, CUDA).decode(BUCKET, 128)
    decode.plan(batch.paged)
    linear.first()
    decode.run(rows.q, before[0], rows.attn.view_as(rows.q))
    linear.after(0)
    assert torch.equal(rows.x, expected)


def test_launches_replay_what_the_graph_does() -> None:
    forward = make_forward(torch.bfloat16, CUTS)
    rows = Rows.empty(SPEC, BUCKET, torch.bfloat16, CUDA)
    start = torch.randn(BUCKET, SPEC.hidden, device=CUDA).bfloat16()
    rows.attn.normal_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward.post_attention(0, rows)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin()
        forward.post_attention(0, rows)
        graph.capture_end()
    graph.instantiate()
    results = []
    for replay in (graph.replay, Launches(graph).replay):
        torch.cuda.synchronize()
        rows.x.copy_(start)
        replay()
        results.append((rows.x.clone(), rows.h.clone()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], start)


def test_blocks_go_to_registered_memory_and_back_unchanged() -> None:
    shape = (64, 4, 2, 2, 16, 64)
    count = int(np.prod(shape)) * 2
    host = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.bfloat16).view(shape)
    seen: list[int] = []
    memory = HostMemory(
        host, host[0].nbytes, chunk_bytes=count // 3, progress=lambda n, _: seen.append(n)
    )
    assert len(seen) > 2 and seen[-1] == count
    pool = kv.make_pool(4, 64, 2, 64, torch.bfloat16, "cuda").normal_()
    before = pool.clone()
    mover = kv.BlockMover(pool, host, ring_blocks=8, chunk_blocks=memory.chunk_pieces)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # Runs that reach across registrations.
    sources, targets = list(range(1, 33)), list(range(29, 61))
    with torch.cuda.stream(stream):
        mover.swap_out_by_kernel(sources, targets)
        stream.synchronize()
        by_kernel = host.clone()
        host.zero_()
        mover.swap_out(sources, targets)
        event = torch.cuda.Event()
        event.record()
        pool[:, 1:33] = 0
        mover.swap_in(targets, sources[::-1])
    torch.cuda.synchronize()
    assert torch.equal(pool[:, 1:33].flip(1), before[:, 1:33])
    assert torch.equal(host[29:61], by_kernel[29:61])
    k, v = (torch.randn(50, 2, 64, device=CUDA).bfloat16() for _ in range(2))
    kv.write_out(k, v, host, 2, torch.tensor([3, 9, 1, 7], dtype=torch.int32, device=CUDA))
    torch.cuda.synchronize()
    stored = host[[3, 9, 1, 7], 2].transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :50]
    assert torch.equal(stored[0], k.cpu()) and torch.equal(stored[1], v.cpu())
    memory.close()
