"""Stages compiled by Inductor ahead of serving.

No guard is checked in a call and nothing can be compiled again behind our back. On the CPU an
executable takes any row count: its loops over columns are as fixed as those over rows can be, and
on one thread all buckets share its code. On a device it takes the shapes that it was built for and
no other. The compiler is imported only where there is something to compile.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualpace.graphs.backends import Arguments, Pack, Stage, Whole, generated
from dualpace.graphs.store import GraphStore, digest

_SOME_ROWS = 64  # what code for any row count is written for, where nothing depends on the count


class Inductor:
    """Weights are arguments, as they are."""

    name = "inductor"
    static = True
    compiled = True
    form = "plain"

    @property
    def pack(self) -> Pack | None:
        return None

    @property
    def whole(self) -> Whole | None:
        return None

    def check(self, dtype: str) -> None:
        pass

    def pads(self, device: str) -> bool:
        return device != "cpu"

    def code_rows(self, bucket: int, threads: int) -> int:
        """Several threads divide a loop or do not, by its length."""
        return _SOME_ROWS if threads == 1 else bucket

    def build(self, stage: Stage, example: Arguments, store: GraphStore | None = None) -> Stage:
        """Compile for these shapes; or load from `store` what an equal environment has compiled,
        for any row count, or compile it there.
        """
        if store is None:
            from dualpace.graphs.backends.lowering import compiled

            return _of_artifact(compiled(stage, example))
        name = graph_name(stage, self._of_code(stage, example))
        while (path := store.graph(name)) is None:
            if not self.ensure(stage, example, store):
                with store.alone(name):
                    pass  # another process has just made it, or given up
        return generated.load(path, store.compiler)

    def ensure(self, stage: Stage, example: Arguments, store: GraphStore) -> bool:
        example = self._of_code(stage, example)

        def make(file: Path, folder: Path) -> None:
            from dualpace.graphs.backends.lowering import lowered

            num_rows = num_rows_arguments(stage)
            source, kernels = lowered(stage, example, num_rows, store.folder)
            generated.save(source, kernels, file, folder)

        return store.publish(graph_name(stage, example), make)

    def _of_code(self, stage: Stage, example: Arguments) -> Arguments:
        """`example` with the row count that its code is written for."""
        first = example[0]
        assert first is not None
        count = self.code_rows(first.shape[0], torch.get_num_threads())
        num = num_rows_arguments(stage)
        rows = [a.new_zeros(count, *a.shape[1:]) for a in example[:num] if a is not None]
        return (*rows, *example[num:])


class InductorPacked(Inductor):
    """Matrices are packed by oneDNN once, and graphs get handles of them."""

    name = "inductor-packed"
    form = "onednn"

    @property
    def pack(self) -> Pack | None:
        from dualpace.cpu.packed import pack

        return pack


def _of_artifact(artifact: Any) -> Stage:
    """An artefact of the compiler, called with the stage's own arguments."""

    def call(*arguments: Tensor | None) -> Any:
        out = artifact(*[a for a in arguments if a is not None])
        if isinstance(out, Tensor):
            return out
        return tuple(out) if len(out) > 1 else out[0]

    return call


def num_rows_arguments(stage: Stage) -> int:
    """How many arguments of a stage, its first, have one row a token or request: their shapes'
    suffixes say so.
    """
    names = inspect.signature(stage).parameters
    return sum(name.rpartition("_")[2].startswith(("T", "B")) for name in names)


def graph_name(stage: Stage, example: Arguments) -> str:
    """The stage, its rows, and a digest of its constants and of the layout of its arguments."""
    function, constants = stage, {}
    if isinstance(stage, partial):
        function, constants = stage.func, stage.keywords
    layouts = [None if a is None else (a.dtype, tuple(a.shape), a.stride()) for a in example]
    assert example[0] is not None
    label = f"{function.__name__}-{example[0].shape[0]}"
    return f"{label}-{digest(repr((sorted(constants.items()), layouts)))}"
