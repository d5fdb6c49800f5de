"""Stages run operation by operation: nothing is compiled, and any row count runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualpace.graphs.backends import Arguments, Pack, Stage, Whole

if TYPE_CHECKING:
    from dualpace.graphs.store import GraphStore


class Eager:
    """Weights as they are: for debugging, for small tests, and what every other one must beat."""

    name = "eager"
    static = False
    compiled = False
    form = "plain"

    @property
    def pack(self) -> Pack | None:
        return None

    @property
    def whole(self) -> Whole | None:
        return None

    def check(self, dtype: str) -> None:
        pass

    def build(self, stage: Stage, example: Arguments, store: GraphStore | None = None) -> Stage:
        return stage

    def pads(self, device: str) -> bool:
        return False

    def code_rows(self, bucket: int, threads: int) -> int:
        return bucket

    def ensure(self, stage: Stage, example: Arguments, store: GraphStore) -> bool:
        return True


class Packed(Eager):
    """Matrices packed by oneDNN: what a start that waits for no compiler begins with."""

    name = "packed"
    form = "onednn"

    @property
    def pack(self) -> Pack | None:
        from dualpace.cpu.packed import pack

        return pack
