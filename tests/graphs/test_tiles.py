"""Stages on tiles: through the unit itself where the CPU has it, else through a stand-in for it.

On a CPU with AMX the tuner's whole way is tested too; elsewhere that part is skipped.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from dualpace.cpu import dense_stage, packed
from dualpace.cpu.isa import Level, detected
from dualpace.graphs import backends
from dualpace.graphs.backends.tiles import Amx, Tiles
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.executor import Stages
from dualpace.graphs.load import load_weights
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.source import Source
from dualpace.graphs.spec import ModelSpec

NATIVE = detected().has(Level.AMX)
PLAIN = SHAPES["tiny"]
RICH = ModelSpec.from_dict(
    {
        **{f: getattr(PLAIN, f) for f in PLAIN.__slots__ if f != "rope_scaling"},
        "qkv_bias": True,
        "qk_norm": True,
        "intermediate": 144,  # no multiple of 32: the stage is not one operation, down is packed
    }
)


class HereAmx(Amx):
    """`amx` on whatever this machine has."""

    def __init__(self) -> None:
        super().__init__(Tiles(NATIVE))

    def check(self, dtype: str) -> None:
        assert dtype == "bf16"


@pytest.fixture(autouse=True)
def amx_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "amx", "here_amx:HereAmx")
    monkeypatch.setitem(sys.modules, "here_amx", sys.modules[__name__])


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


@pytest.mark.parametrize("spec", [PLAIN, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_stages_are_as_near_to_eager_as_compiled_ones(spec: ModelSpec, rows: int) -> None:
    assert_like_eager(build(spec, "amx"), spec, rows)


def test_post_attention_of_a_layer_is_one_operation_with_common_rooms() -> None:
    table = build(PLAIN, "amx").tables()["post_attention"]
    assert table.any_rows is not None
    handles = table.any_rows.weights
    assert [len(weights) for weights in handles] == [1] * PLAIN.num_layers
    layers = [dense_stage._stages[int(handle)] for (handle,) in handles]
    assert len({id(layer._rooms) for layer in layers}) == 1


def test_weights_go_with_the_stages_that_used_them() -> None:
    gc.collect()
    before = len(packed._linears), len(dense_stage._stages)
    stages = build(PLAIN, "amx")
    assert (len(packed._linears), len(dense_stage._stages)) > before
    del stages
    gc.collect()
    assert (len(packed._linears), len(dense_stage._stages)) == before


def test_the_tuner_compares_them_and_times_one_executable_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backends.BACKENDS, "twin", "here_amx:HereAmx")
    cache, weights = GraphCache(), load_weights(Source("random", None, PLAIN, "t"), torch.bfloat16)
    cache.build(
        PLAIN, weights, backend=("eager", "amx", "twin"), buckets=(1, 4), cache_dir=tmp_path
    )
    for (stage, _), times in cache.times.items():
        assert set(times) == {"eager", "amx", "twin"}
        if stage == "post_attention":  # the same function over the same weights
            assert times["amx"] == times["twin"]


@pytest.mark.skipif(not NATIVE, reason="needs AMX")
@pytest.mark.timeout(300)
def test_the_tuner_times_tiles_and_what_it_picks_is_right(tmp_path: Path) -> None:
    candidates = ("eager", "packed", "inductor-packed", "amx", "inductor-amx")
    stages = build(PLAIN, candidates, tmp_path)
    only = build(PLAIN, "inductor-amx", tmp_path)
    for rows in (1, 3, 4, 5, 9):
        assert_like_eager(stages, PLAIN, rows)
        assert_like_eager(only, PLAIN, rows)
    assert stages.compiles_after_ready == only.compiles_after_ready == 0
    assert set(only.tables()["pre_attention"].names().values()) == {"inductor-amx"}
