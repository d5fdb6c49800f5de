"""Stages as they stand, run operation by operation: for debugging and for small tests."""

from __future__ import annotations

from torch import Tensor

from dualpace.graphs.backends import Stage
from dualpace.graphs.weights import Weights


class Eager:
    """Nothing is compiled, so any row count runs."""

    name = "eager"
    static = False

    def prepare(self, weights: Weights) -> Weights:
        return weights

    def build(self, stage: Stage, example: tuple[Tensor | None, ...]) -> Stage:
        return stage

    def num_compiles(self) -> int:
        return 0
