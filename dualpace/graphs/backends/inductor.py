"""Stages compiled by Inductor ahead of serving, one executable a stage and bucket.

No guard is checked in a call and nothing can be compiled again behind our back: an executable takes
the shapes that it was built for and no other. The compiler is imported only where there is
something to compile.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dualpace.graphs.backends import Arguments, Pack, Stage, Whole, generated
from dualpace.graphs.store import GraphStore, digest


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

    def build(self, stage: Stage, example: Arguments, store: GraphStore | None = None) -> Stage:
        """Compile, or load from `store` what an equal environment has compiled before."""
        if store is None:
            from dualpace.graphs.backends.lowering import compiled

            return _of_artifact(compiled(stage, example))
        name = graph_name(stage, example)
        while (path := store.graph(name)) is None:
            if not self.ensure(stage, example, store):
                with store.alone(name):
                    pass  # another process has just made it, or given up
        return generated.load(path, store.compiler)

    def ensure(self, stage: Stage, example: Arguments, store: GraphStore) -> bool:
        def make(file: Path, folder: Path) -> None:
            from dualpace.graphs.backends.lowering import lowered

            source, kernels = lowered(stage, example, store.folder)
            generated.save(source, kernels, file, folder)

        return store.publish(graph_name(stage, example), make)


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


def graph_name(stage: Stage, example: Arguments) -> str:
    """The stage, its rows, and a digest of its constants and of the layout of its arguments."""
    function, constants = stage, {}
    if isinstance(stage, partial):
        function, constants = stage.func, stage.keywords
    layouts = [None if a is None else (a.dtype, tuple(a.shape), a.stride()) for a in example]
    assert example[0] is not None
    label = f"{function.__name__}-{example[0].shape[0]}"
    return f"{label}-{digest(repr((sorted(constants.items()), layouts)))}"
