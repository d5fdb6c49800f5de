"""Stages as they stand, run operation by operation: for debugging and for small tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from dualpace.graphs.backends import Stage
from dualpace.graphs.weights import Weights

if TYPE_CHECKING:
    from dualpace.graphs.store import GraphStore


class Eager:
    """Nothing is compiled, so any row count runs."""

    name = "eager"
    static = False

    def prepare(self, weights: Weights) -> Weights:
        return weights

    def build(
        self, stage: Stage, example: tuple[Tensor | None, ...], store: GraphStore | None = None
    ) -> Stage:
        return stage

    def num_compiles(self) -> int:
        return 0
