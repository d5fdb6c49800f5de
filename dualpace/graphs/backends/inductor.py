"""Stages compiled by Inductor ahead of serving, one artefact a stage and bucket.

A stage is traced once and its graph handed to Inductor directly. Dynamo takes no part, so no guard
is checked in a call and nothing can be compiled again behind our back: an executable takes the
shapes that it was built for and no other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import CompiledArtifact, standalone_compile
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from dualpace.graphs.backends import Stage
from dualpace.graphs.store import GraphStore, digest
from dualpace.graphs.weights import LayerWeights, Weights

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Inductor:
    """Weights are arguments, as they are."""

    name = "inductor"
    static = True

    def prepare(self, weights: Weights) -> Weights:
        return weights

    def build(
        self, stage: Stage, example: tuple[Tensor | None, ...], store: GraphStore | None = None
    ) -> Stage:
        """Compile, or load from `store` what an equal environment has compiled before."""
        with _compiler_folder(store), torch.no_grad():
            artifact = self._load_or_compile(stage, example, store)
            executable = _Executable(artifact)
            executable(*example)  # loads the kernels
        return executable

    def num_compiles(self) -> int:
        """Compilations by Inductor and Dynamo in this process, whoever asked for them."""
        inductor = counters["inductor"]
        return (
            inductor["fxgraph_cache_miss"]
            + inductor["fxgraph_cache_bypass"]
            + counters["stats"]["unique_graphs"]
        )

    def _load_or_compile(
        self, stage: Stage, example: tuple[Tensor | None, ...], store: GraphStore | None
    ) -> CompiledArtifact:
        if store is None:
            return _compile(stage, example)
        name = _graph_name(stage, example)
        path = store.graph(name)
        if path is not None:
            return CompiledArtifact.load(path=str(path), format="binary")
        artifact = _compile(stage, example)
        written = store.folder / f"{name}.{os.getpid()}"
        artifact.save(path=str(written), format="binary")
        store.publish(name, written)
        return artifact


class InductorPacked(Inductor):
    """Matrices are packed by oneDNN once, and graphs get handles of them."""

    name = "inductor-packed"

    def prepare(self, weights: Weights) -> Weights:
        layers = tuple(_pack_layer(layer) for layer in weights.layers)
        return replace(weights, layers=layers, head=_pack(weights.head))


def _pack(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from dualpace.cpu.packed import pack

    return pack(weight, bias)


def _pack_layer(layer: LayerWeights) -> LayerWeights:
    return replace(
        layer,
        qkv=_pack(layer.qkv, layer.qkv_bias),
        qkv_bias=None,
        o=_pack(layer.o),
        gate_up=_pack(layer.gate_up),
        down=_pack(layer.down),
    )


class _Executable:
    """An artefact called with the stage's own arguments."""

    def __init__(self, artifact: CompiledArtifact) -> None:
        self._artifact = artifact

    def __call__(self, *arguments: Tensor | None) -> Any:
        out = self._artifact(*[a for a in arguments if a is not None])
        if isinstance(out, Tensor):
            return out
        return tuple(out) if len(out) > 1 else out[0]  # one from disk comes in a list of its own


def _compile(stage: Stage, example: tuple[Tensor | None, ...]) -> CompiledArtifact:
    present = [argument is not None for argument in example]
    tensors = [argument for argument in example if argument is not None]

    def of_tensors(*given: Tensor) -> Any:
        rest = iter(given)
        return stage(*[next(rest) if there else None for there in present])

    graph = make_fx(of_tensors, tracing_mode="fake")(*tensors)
    # A pool of compiler processes would outlive the build for the few graphs there are.
    with inductor_config.patch(compile_threads=1):
        return standalone_compile(graph, tensors, dynamic_shapes="from_example_inputs")


def _graph_name(stage: Stage, example: tuple[Tensor | None, ...]) -> str:
    """The stage, its rows, and a digest of its constants and of the layout of its arguments."""
    function, constants = stage, {}
    if isinstance(stage, partial):
        function, constants = stage.func, stage.keywords
    layouts = [None if a is None else (a.dtype, tuple(a.shape), a.stride()) for a in example]
    assert example[0] is not None
    label = f"{function.__name__}-{example[0].shape[0]}"
    return f"{label}-{digest(repr((sorted(constants.items()), layouts)))}"


@contextmanager
def _compiler_folder(store: GraphStore | None) -> Iterator[None]:
    """Inductor keeps its own files where this variable says, and sets it if nobody has."""
    if store is None:
        yield
        return
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = str(store.compiler)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CACHE_VARIABLE, None)
        else:
            os.environ[_CACHE_VARIABLE] = before
