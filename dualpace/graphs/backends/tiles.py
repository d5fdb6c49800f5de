"""Stages on AMX tiles: matrices in tile order, post-attention as a whole with fused epilogues.

For bf16 on CPUs with AMX. All products of a process take their room from one `Rooms`, since they
run after each other; a matrix that the tile product does not take is packed by oneDNN instead.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from dualpace.cpu import dense_stage, gemm, packed
from dualpace.cpu.isa import Level, detected
from dualpace.errors import ConfigError
from dualpace.graphs import stages
from dualpace.graphs.backends import Arguments, Pack, Stage, Whole
from dualpace.graphs.backends.eager import Eager
from dualpace.graphs.backends.inductor import Inductor
from dualpace.graphs.store import GraphStore


class Tiles:
    """The layout of both backends. native=False needs no tile unit, and is slow (tests)."""

    def __init__(self, native: bool = True) -> None:
        self._native = native
        self._rooms = dense_stage.Rooms()

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A handle for `packed_linear`."""
        if not gemm.fits(*weight.shape):
            return packed.pack(weight, bias)
        linear = gemm.TileLinear(weight, native=self._native, scratch=self._rooms.tiles)
        if bias is None:
            return packed.register(linear)
        return packed.register(lambda x: linear(x).add_(bias))

    def takes(self, stage: Stage, arguments: Arguments) -> bool:
        """Post-attention of sizes that fit."""
        if not _is_post_attention(stage):
            return False
        o, _, gate_up, down = arguments
        assert o is not None and gate_up is not None and down is not None
        return dense_stage.takes(o, gate_up, down)

    def pack(self, stage: Stage, arguments: Arguments) -> Tensor:
        """A handle for `dense_stage.post_attention`."""
        assert isinstance(stage, partial)
        eps = stage.keywords["eps"]
        layer = dense_stage.PostAttention(*arguments, eps, self._rooms, self._native)
        return dense_stage.pack_post_attention(layer)


def _is_post_attention(stage: Stage) -> bool:
    return isinstance(stage, partial) and stage.func is stages.post_attention


def is_whole(stage: Stage, example: Arguments) -> bool:
    """Whether `example` (rows and weights of `stage`) is post-attention behind one handle."""
    return _is_post_attention(stage) and len(example) == 3


def check(name: str, dtype: str) -> None:
    """ConfigError where there is no tile unit for weights of this dtype."""
    if dtype != "bf16":
        raise ConfigError(
            f"compile.backend={name} multiplies bf16 only: set model.dtype=bf16, or another backend"
        )
    if not detected().has(Level.AMX):
        raise ConfigError(
            f"compile.backend={name} needs AMX tiles ({detected().reason}): choose another backend"
        )


class _OnTiles:
    """Weights as tiles, post-attention behind one handle."""

    name: str
    form = "tiles"

    def __init__(self, tiles: Tiles | None = None) -> None:
        self._tiles = tiles or Tiles()

    @property
    def pack(self) -> Pack | None:
        return self._tiles.matrix

    @property
    def whole(self) -> Whole | None:
        return self._tiles

    def check(self, dtype: str) -> None:
        check(self.name, dtype)


class Amx(_OnTiles, Eager):
    """Nothing compiled by Inductor: what a start on tiles begins with."""

    name = "amx"

    def build(self, stage: Stage, example: Arguments, store: GraphStore | None = None) -> Stage:
        return dense_stage.post_attention if is_whole(stage, example) else stage


class InductorAmx(_OnTiles, Inductor):
    """The graphs of packed matrices, whose handles lead to tiles; post-attention is `amx`'s."""

    name = "inductor-amx"

    def build(self, stage: Stage, example: Arguments, store: GraphStore | None = None) -> Stage:
        if is_whole(stage, example):
            return dense_stage.post_attention
        return super().build(stage, example, store)

    def ensure(self, stage: Stage, example: Arguments, store: GraphStore) -> bool:
        return is_whole(stage, example) or super().ensure(stage, example, store)
