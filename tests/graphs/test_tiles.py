"""Stages on tiles: through the unit itself where the CPU has it, else through a stand-in for it.

On a CPU with AMX the tuner's whole way is tested too; elsewhere that part is skipped.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from dualpace.cpu import packed
from dualpace.cpu.append import kv_append
from dualpace.graphs import backends
from dualpace.graphs.backends import whole
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.executor import Stages
from dualpace.graphs.load import load_weights
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.source import Source
from dualpace.graphs.spec import ModelSpec
from tests.graphs import here

PLAIN = SHAPES["tiny"]
RICH = ModelSpec.from_dict(
    {
        **{f: getattr(PLAIN, f) for f in PLAIN.__slots__ if f != "rope_scaling"},
        "qkv_bias": True,
        "qk_norm": True,
        "intermediate": 144,  # no multiple of 32: the stage is not one operation, down is packed
    }
)


# Heads of whole tiles, so that pre-attention is one operation too, plain and with all there is.
SIZES = {f: getattr(PLAIN, f) for f in PLAIN.__slots__ if f != "rope_scaling"} | {"head_dim": 32}
WHOLE = ModelSpec.from_dict(SIZES)
WHOLE_RICH = ModelSpec.from_dict(SIZES | {"qkv_bias": True, "qk_norm": True, "head_dim": 64})
SPECS = {"plain": PLAIN, "rich": RICH, "whole": WHOLE, "whole_rich": WHOLE_RICH}


@pytest.fixture(autouse=True)
def tiles_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in here.BACKENDS.items():
        monkeypatch.setitem(backends.BACKENDS, name, place)


def build(spec: ModelSpec, backend: str | tuple[str, ...], folder: Path | None = None) -> Stages:
    weights = load_weights(Source("random", None, spec, "tiny"), torch.bfloat16)
    stages = GraphCache().build(spec, weights, backend=backend, buckets=(1, 4), cache_dir=folder)
    stages.ready()
    return stages


def assert_like_eager(stages: Stages, spec: ModelSpec, rows: int) -> None:
    plain = build(spec, "eager")
    x, positions = torch.randn(rows, spec.hidden).bfloat16(), torch.arange(rows)
    attn = torch.randn(rows, spec.q_size).bfloat16()
    for layer in range(spec.num_layers):
        pairs = [
            *zip(
                stages.pre_attention(layer, x, positions),
                plain.pre_attention(layer, x, positions),
                strict=True,
            ),
            (stages.post_attention(layer, attn, x), plain.post_attention(layer, attn, x)),
            (stages.logits(x), plain.logits(x)),
        ]
        for ours, eager in pairs:
            error = float((ours.float() - eager.float()).abs().max() / eager.float().abs().max())
            assert error <= 1.6e-2


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_stages_are_as_near_to_eager_as_compiled_ones(spec: ModelSpec, rows: int) -> None:
    assert_like_eager(build(spec, "amx"), spec, rows)


@pytest.mark.parametrize("spec", [RICH, WHOLE_RICH], ids=["rich", "whole_rich"])
def test_vectors_multiply_the_same_tiles(spec: ModelSpec) -> None:
    assert_like_eager(build(spec, "avx512-bf16"), spec, 21)


@pytest.mark.parametrize("rows", [3, 21])
@pytest.mark.parametrize(("spec", "backend"), [(WHOLE, "eager"), (WHOLE_RICH, "amx")])
def test_keys_and_values_are_stored_as_they_are_returned(
    spec: ModelSpec, backend: str, rows: int
) -> None:
    stages = build(spec, backend)
    x, positions = torch.randn(rows, spec.hidden).bfloat16(), torch.randint(0, 99, (rows,))
    slots = torch.randperm(64)[:rows]
    pool = torch.randn(4, 3, 2, spec.num_kv_heads, 16, spec.head_dim).bfloat16()
    expected = pool.clone()
    entry = stages.tables()["pre_attention"].any_rows
    assert entry is not None
    for layer in range(spec.num_layers):
        q, k, v = stages.pre_attention(layer, x, positions)
        kv_append(k, v, expected[:, layer], slots)
        given = x, positions, entry.weights[layer], pool[:, layer], slots
        assert torch.equal(whole.stored_by(entry.graph, *given), q)
    assert torch.equal(pool, expected)


def test_post_attention_of_a_layer_is_one_operation_with_common_rooms() -> None:
    table = build(PLAIN, "amx").tables()["post_attention"]
    assert table.any_rows is not None
    handles = table.any_rows.weights
    assert [len(weights) for weights in handles] == [1] * PLAIN.num_layers
    layers = [whole.POST_LAYERS[handle] for (handle,) in handles]
    assert len({id(layer._rooms) for layer in layers}) == 1
    for spec, is_whole in ((WHOLE, True), (PLAIN, False)):
        entry = build(spec, "amx").tables()["pre_attention"].any_rows
        assert entry is not None and (entry.graph is whole.WHOLE_PRE_ATTENTION) == is_whole
        assert all((len(weights) == 1) == is_whole for weights in entry.weights)


def sizes() -> tuple[int, ...]:
    return tuple(map(len, (packed.LINEARS, whole.PRE_LAYERS, whole.POST_LAYERS)))


def test_weights_go_with_the_stages_that_used_them() -> None:
    gc.collect()
    before = sizes()
    stages = build(WHOLE, "amx")
    assert all(now > then for now, then in zip(sizes(), before, strict=True))
    del stages
    gc.collect()
    assert sizes() == before


def test_the_tuner_compares_them_and_times_one_executable_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backends.BACKENDS, "twin", here.BACKENDS["amx"])
    cache, weights = GraphCache(), load_weights(Source("random", None, WHOLE, "t"), torch.bfloat16)
    cache.build(
        WHOLE, weights, backend=("eager", "amx", "twin"), buckets=(1, 4), cache_dir=tmp_path
    )
    for (stage, _), times in cache.times.items():
        assert set(times) == {"eager", "amx", "twin"}
        if stage in ("pre_attention", "post_attention"):  # one function over the same weights
            assert times["amx"] == times["twin"]


@pytest.mark.skipif(not here.HAS_AMX, reason="needs AMX")
def test_the_tuner_times_tiles_and_what_it_picks_is_right(tmp_path: Path) -> None:
    candidates = ("eager", "packed", "inductor-packed", "amx", "inductor-amx")
    stages = build(WHOLE, candidates, tmp_path)
    only = build(WHOLE, "inductor-amx", tmp_path)
    for rows in (1, 3, 4, 5, 9):
        assert_like_eager(stages, WHOLE, rows)
        assert_like_eager(only, WHOLE, rows)
    assert stages.compiles_after_ready == only.compiles_after_ready == 0
    assert set(only.tables()["pre_attention"].names().values()) == {"inductor-amx"}
