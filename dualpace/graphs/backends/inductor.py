"""Stages compiled by Inductor ahead of serving, one artefact a stage and bucket.

A stage is traced once and its graph handed to Inductor directly. Dynamo takes no part, so no guard
is checked in a call and nothing can be compiled again behind our back: an executable takes the
shapes that it was built for and no other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import CompiledArtifact, standalone_compile
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from dualpace.errors import ConfigError
from dualpace.graphs.backends import Arguments, Pack, Stage
from dualpace.graphs.store import GraphStore, digest

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Inductor:
    """Weights are arguments, as they are."""

    name = "inductor"
    static = True
    compiled = True
    form = "plain"

    @property
    def pack(self) -> Pack | None:
        return None

    def check(self, dtype: str) -> None:
        pass

    def build(self, stage: Stage, example: Arguments, store: GraphStore | None = None) -> Stage:
        """Compile, or load from `store` what an equal environment has compiled before."""
        with torch.no_grad():
            if store is None:
                return _Executable(_compile(stage, example))
            name = graph_name(stage, example)
            while (path := store.graph(name)) is None:
                if not self.ensure(stage, example, store):
                    with store.alone(name):
                        pass  # another process has just made it, or given up
            with _compiler_folder(store.compiler):
                executable = _Executable(CompiledArtifact.load(path=str(path), format="binary"))
                executable(*example)  # loads the kernels
        return executable

    def ensure(self, stage: Stage, example: Arguments, store: GraphStore) -> bool:
        def make(file: Path, folder: Path) -> None:
            with _compiler_folder(folder), torch.no_grad():
                _compile(stage, example).save(path=str(file), format="binary")

        return store.publish(graph_name(stage, example), make)


class InductorPacked(Inductor):
    """Matrices are packed by oneDNN once, and graphs get handles of them."""

    name = "inductor-packed"
    form = "onednn"

    @property
    def pack(self) -> Pack | None:
        from dualpace.cpu.packed import pack

        return pack


class InductorAmx(Inductor):
    """The same graphs, whose handles lead to the tile GEMM where it takes the matrix."""

    name = "inductor-amx"
    form = "tiles"

    def check(self, dtype: str) -> None:
        from dualpace.cpu.isa import Level, detected

        if dtype != "bf16":
            raise ConfigError(
                f"compile.backend={self.name} multiplies bf16 only: set model.dtype=bf16, or "
                "another backend"
            )
        if not detected().has(Level.AMX):
            raise ConfigError(
                f"compile.backend={self.name} needs AMX tiles ({detected().reason}): choose "
                "another backend"
            )

    @property
    def pack(self) -> Pack | None:
        return _tiles


def _tiles(weight: Tensor, bias: Tensor | None) -> Tensor:
    from dualpace.cpu import gemm, packed

    if bias is not None or not gemm.fits(*weight.shape):
        return packed.pack(weight, bias)
    return packed.register(gemm.TileLinear(weight))


class _Executable:
    """An artefact called with the stage's own arguments."""

    def __init__(self, artifact: CompiledArtifact) -> None:
        self._artifact = artifact

    def __call__(self, *arguments: Tensor | None) -> Any:
        out = self._artifact(*[a for a in arguments if a is not None])
        if isinstance(out, Tensor):
            return out
        return tuple(out) if len(out) > 1 else out[0]  # one from disk comes in a list of its own


def _compile(stage: Stage, example: Arguments) -> CompiledArtifact:
    present = [argument is not None for argument in example]
    tensors = [argument for argument in example if argument is not None]

    def of_tensors(*given: Tensor) -> Any:
        rest = iter(given)
        return stage(*[next(rest) if there else None for there in present])

    if any(t.dim() == 0 for t in tensors):
        import dualpace.cpu.packed  # noqa: F401  (the operation behind handles)
    graph = make_fx(of_tensors, tracing_mode="fake")(*tensors)
    # A pool of compiler processes would outlive the build for the few graphs there are.
    with inductor_config.patch(compile_threads=1):
        return standalone_compile(graph, tensors, dynamic_shapes="from_example_inputs")


def graph_name(stage: Stage, example: Arguments) -> str:
    """The stage, its rows, and a digest of its constants and of the layout of its arguments."""
    function, constants = stage, {}
    if isinstance(stage, partial):
        function, constants = stage.func, stage.keywords
    layouts = [None if a is None else (a.dtype, tuple(a.shape), a.stride()) for a in example]
    assert example[0] is not None
    label = f"{function.__name__}-{example[0].shape[0]}"
    return f"{label}-{digest(repr((sorted(constants.items()), layouts)))}"


@contextmanager
def _compiler_folder(folder: Path) -> Iterator[None]:
    """Inductor keeps its own files where this variable says, and sets it if nobody has."""
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CACHE_VARIABLE, None)
        else:
            os.environ[_CACHE_VARIABLE] = before
