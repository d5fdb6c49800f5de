"""The executor's padding and pieces, attention over chunks and pages, random weights."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dualpace.errors import ConfigError
from dualpace.graphs import backends
from dualpace.graphs.attention import causal_prefill, gather_context, paged_decode_reference
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.load import load_weights
from dualpace.graphs.sampling import SamplingRows, sample
from dualpace.graphs.source import resolve_source
from tests.graphs.reference import KV, load_stages, run_logits


class Recording:
    """A backend whose executables take only their own row count, and say which one ran."""

    name = "recording"
    static = True
    compiled = False
    form = "plain"
    pack = None
    whole = None
    ran: list[int] = []  # noqa: RUF012

    def check(self, dtype: str) -> None:
        pass

    def pads(self, device: str) -> bool:
        return True

    def code_rows(self, bucket: int, threads: int) -> int:
        return bucket

    def ensure(self, stage: Any, example: tuple[Any, ...], store: Any) -> bool:
        return True

    def build(self, stage: Any, example: tuple[Any, ...], store: Any = None) -> Any:
        rows = example[0].shape[0]

        def run(*args: Any) -> Any:
            assert [a.shape for a in args if a is not None] == [
                e.shape for e in example if e is not None
            ]
            self.ran.append(rows)
            return stage(*args)

        return run


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    monkeypatch.setitem(backends.BACKENDS, "recording", "recording:Recording")
    monkeypatch.setitem(sys.modules, "recording", sys.modules[__name__])
    Recording.ran = []
    return Recording


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9, 16, 17, 21, 40])
def test_padded_and_cut_batches_equal_eager_ones(rows: int, recording: type[Recording]) -> None:
    ids = list(range(rows))
    static = load_stages("random:tiny", backend="recording", buckets=[8, 4, 16])
    recording.ran.clear()
    logits = run_logits(static, 2, ids)
    assert set(recording.ran) <= {4, 8, 16}
    torch.testing.assert_close(logits, run_logits(load_stages("random:tiny"), 2, ids))
    assert rows <= static.bucket(rows) < rows + 8


def test_rows_behind_a_cut_tensor_do_not_show(recording: type[Recording]) -> None:
    """Padding may be whatever lies behind the rows; results are those of the rows alone."""
    static = load_stages("random:tiny", backend="recording", buckets=[8])
    plain = load_stages("random:tiny")
    x = torch.randn(8, 64)
    x[5:] = torch.nan
    attn = torch.full((8, plain.pre_attention(0, x, torch.arange(8))[0][0].numel()), torch.nan)
    attn[:5] = torch.randn(5, attn.shape[1])
    out = static.post_attention(0, attn[:5], x[:5])
    torch.testing.assert_close(out, plain.post_attention(0, attn[:5].clone(), x[:5].clone()))


def test_better_tables_serve_from_the_next_round_on(recording: type[Recording]) -> None:
    stages = load_stages("random:tiny")
    better = load_stages("random:tiny", backend="recording", buckets=[4]).tables()
    recording.ran.clear()
    for stage, table in better.items():
        stages.offer(stage, table)
    run_logits(stages, 2, [1, 2])
    assert recording.ran == []
    stages.begin_round()
    run_logits(stages, 2, [1, 2])
    assert set(recording.ran) == {4}


def test_executables_are_shared_by_builds_of_one_cache(recording: type[Recording]) -> None:
    source, cache = resolve_source("random:tiny"), GraphCache()
    weights = load_weights(source, torch.float32)
    cache.build(source.spec, weights, backend="recording", buckets=[4, 8])
    graphs = dict(cache.graphs)
    cache.build(source.spec, weights, backend="recording", buckets=[4, 8])
    assert cache.graphs == graphs
    assert {key.bucket for key in graphs if key.stage != "pre_layer"} == {4, 8}


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile\.backend=turbo"):
        load_stages("random:tiny", backend="turbo")


def test_post_layer_samples_what_logits_say() -> None:
    stages = load_stages("random:tiny")
    x = torch.randn(5, 64)
    greedy = stages.post_layer(x, SamplingRows.greedy(5))
    assert greedy.dtype == torch.int32
    assert torch.equal(greedy, stages.logits(x).argmax(-1).int())
    rows = SamplingRows.of(
        torch.full((5,), 2.0), torch.full((5,), 9, dtype=torch.int32), torch.ones(5), torch.rand(5)
    )
    assert torch.equal(stages.post_layer(x, rows), sample(stages.logits(x), rows))


def test_prompt_in_chunks_equals_prompt_at_once() -> None:
    stages, ids = load_stages("random:tiny"), list(range(40))
    whole = run_logits(stages, 2, ids)
    kv = KV()
    chunked = torch.cat(
        [run_logits(stages, 2, ids[a:b], kv) for a, b in [(0, 16), (16, 33), (33, 40)]]
    )
    torch.testing.assert_close(chunked, whole)


def test_ragged_prompts_do_not_see_each_other() -> None:
    lens, context = [3, 1, 7], 5
    q, k, v = torch.randn(11, 4, 16), torch.randn(11, 2, 16), torch.randn(11, 2, 16)
    earlier = (torch.randn(context, 2, 16), torch.randn(context, 2, 16))
    out = causal_prefill(q, k, v, lens, [None, earlier, None])
    start = 0
    for index, length in enumerate(lens):
        own = slice(start, start + length)
        keys = torch.cat((earlier[0], k[own])) if index == 1 else k[own]
        values = torch.cat((earlier[1], v[own])) if index == 1 else v[own]
        for row in range(length):
            seen = keys.shape[0] - length + row + 1
            scores = torch.einsum("nd,lnd->nl", q[start + row], keys[:seen].repeat_interleave(2, 1))
            weights = (scores / 4).softmax(-1)
            expected = torch.einsum("nl,lnd->nd", weights, values[:seen].repeat_interleave(2, 1))
            torch.testing.assert_close(out[start + row], expected, atol=1e-5, rtol=1e-5)
        start += length


def test_paged_decode_equals_attention_over_the_gathered_context() -> None:
    cache = torch.randn(9, 2, 2, 16, 8)
    tables = torch.tensor([[3, 1, 8], [5, 2, 0]], dtype=torch.int32)
    lens, q = torch.tensor([37, 16], dtype=torch.int32), torch.randn(2, 6, 8)
    out = paged_decode_reference(q, cache, tables, lens, 8**-0.5)
    for row, length in enumerate(lens.tolist()):
        k, v = gather_context(cache, tables[row].long(), length)
        token = length - 4
        assert torch.equal(k[token], cache[tables[row, token // 16], 0, :, token % 16])
        expected = F.scaled_dot_product_attention(
            q[row][:, None], k.transpose(0, 1), v.transpose(0, 1), enable_gqa=True
        )
        torch.testing.assert_close(out[row], expected[:, 0])


def test_random_weights_are_reproducible_and_have_no_repeated_rows() -> None:
    source = resolve_source("random:tiny")
    first, again = (load_weights(source, torch.float32) for _ in range(2))
    other = load_weights(source, torch.float32, seed=1)
    pairs = list(zip(first.tensors(), again.tensors(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.embed, other.embed)
    assert len(first.head.unique(dim=0)) == len(first.head)
    assert not torch.equal(first.layers[0].qkv, first.layers[1].qkv)
    bf16 = load_weights(source, torch.bfloat16)
    assert torch.equal(bf16.layers[1].down, first.layers[1].down.bfloat16())


def test_random_model_has_logits_of_a_sane_scale() -> None:
    logits = run_logits(load_stages("random:tiny"), 2, list(range(50)))
    assert 0.3 < float(logits.std()) < 3


def test_bf16_logits_are_near_float32_ones() -> None:
    ids = list(range(40))
    exact = run_logits(load_stages("random:tiny"), 2, ids)
    rounded = run_logits(load_stages("random:tiny", torch.bfloat16), 2, ids)
    assert rounded.dtype == torch.float32
    assert float((rounded - exact).abs().max()) < 0.05 * float(exact.abs().max())
