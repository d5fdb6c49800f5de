"""Stages on tiles: matrices in tile order, both dense stages as a whole with fused epilogues.

For bf16, by AMX's tile unit or, on CPUs without it, by vectors that multiply bf16 pairs. All
products of a process take their room from one `Rooms`, since they run after each other; a matrix
that the tile product does not take is packed by oneDNN instead.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from dualpace.cpu import chain, dense_stage, gemm, packed, qkv
from dualpace.cpu.isa import Level, detected
from dualpace.errors import ConfigError
from dualpace.graphs import stages
from dualpace.graphs.backends import Arguments, Pack, Stage, Whole
from dualpace.graphs.backends.eager import Eager
from dualpace.graphs.backends.inductor import Inductor
from dualpace.graphs.backends.whole import (
    POST_LAYERS,
    PRE_LAYERS,
    WHOLE_PRE_ATTENTION,
    PreLayer,
    Round,
    whole_post_attention,
)
from dualpace.graphs.store import GraphStore


class Tiles:
    """A layout of weights, and what multiplies them."""

    def __init__(self, unit: gemm.Unit) -> None:
        self._unit = unit
        self._rooms, self._round = dense_stage.Rooms(), Round()

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A handle for `packed_linear`."""
        if not gemm.fits(*weight.shape):
            return packed.pack(weight, bias)
        return packed.register(
            gemm.TileLinear(weight, unit=self._unit, scratch=self._rooms.tiles, bias=bias)
        )

    def takes(self, stage: Stage, arguments: Arguments) -> bool:
        """Pre- and post-attention of sizes that fit."""
        if _is(stages.post_attention, stage):
            o, _, gate_up, down = arguments
            assert o is not None and gate_up is not None and down is not None
            return dense_stage.takes(o, gate_up, down)
        if _is(stages.pre_attention, stage):
            matrix = arguments[3]
            assert isinstance(stage, partial) and matrix is not None
            return qkv.takes(matrix, stage.keywords["heads"][2])
        return False

    def pack(self, stage: Stage, arguments: Arguments) -> Tensor:
        """A handle for the executable that `whole_executable` says."""
        assert isinstance(stage, partial)
        eps = stage.keywords["eps"]
        if _is(stages.post_attention, stage):
            layer = dense_stage.PostAttention(*arguments, eps, self._rooms, self._unit)  # type: ignore[arg-type]
            return POST_LAYERS.add(layer)
        cos, sin, norm, matrix, bias, q_norm, k_norm = arguments
        assert cos is not None and sin is not None and norm is not None and matrix is not None
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        heads = stage.keywords["heads"]
        product = qkv.PreAttention(norm, matrix, heads, eps, self._rooms, self._unit, bias, norms)
        chain.warm_up()  # now rather than in service
        return PRE_LAYERS.add(PreLayer(product, cos, sin, self._round))


def whole_executable(stage: Stage, example: Arguments) -> Stage | None:
    """The executable of `stage` where its weights are one handle (`example`: rows and weights)."""
    if len(example) != 3:  # two tensors of rows, and the handle
        return None
    if _is(stages.post_attention, stage):
        return whole_post_attention
    return WHOLE_PRE_ATTENTION if _is(stages.pre_attention, stage) else None


def _is(function: Stage, stage: Stage) -> bool:
    return isinstance(stage, partial) and stage.func is function


class _OnTiles:
    """Weights as tiles, both dense stages behind one handle each."""

    name: str
    form: str
    unit: gemm.Unit

    def __init__(self, tiles: Tiles | None = None) -> None:
        self._tiles = tiles or Tiles(self.unit)

    @property
    def pack(self) -> Pack | None:
        return self._tiles.matrix

    @property
    def whole(self) -> Whole | None:
        return self._tiles

    def check(self, dtype: str) -> None:
        """ConfigError where nothing here multiplies weights of this dtype so."""
        if dtype != "bf16":
            raise ConfigError(
                f"compile.backend={self.name} multiplies bf16 only: set model.dtype=bf16, or "
                "another backend"
            )
        level, what = _NEEDS[self.form]
        if not detected().has(level):
            raise ConfigError(
                f"compile.backend={self.name} needs {what} ({detected().reason}): choose another "
                "backend"
            )


_NEEDS = {
    "tiles": (Level.AMX, "AMX tiles"),
    "vectors": (Level.AVX512_BF16, "the bf16 instructions of AVX-512"),
}


class _Uncompiled(_OnTiles, Eager):
    """Nothing compiled by Inductor: what a start on tiles begins with."""

    def build(self, stage: Stage, example: Arguments, store: GraphStore | None = None) -> Stage:
        return whole_executable(stage, example) or stage


class _Compiled(_OnTiles, Inductor):
    """The graphs of packed matrices, whose handles lead to tiles, but for the stages that are one
    operation.
    """

    def build(self, stage: Stage, example: Arguments, store: GraphStore | None = None) -> Stage:
        return whole_executable(stage, example) or super().build(stage, example, store)

    def ensure(self, stage: Stage, example: Arguments, store: GraphStore) -> bool:
        whole = whole_executable(stage, example)
        return whole is not None or super().ensure(stage, example, store)


class Amx(_Uncompiled):
    name, form, unit = "amx", "tiles", gemm.TILES


class InductorAmx(_Compiled):
    name, form, unit = "inductor-amx", "tiles", gemm.TILES


class Avx512Bf16(_Uncompiled):
    name, form, unit = "avx512-bf16", "vectors", gemm.VECTORS


class InductorAvx512Bf16(_Compiled):
    name, form, unit = "inductor-avx512-bf16", "vectors", gemm.VECTORS
