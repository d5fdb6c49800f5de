"""Which weights each stage takes, in which layout: plain matrices, or handles of packed ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dualpace.graphs.backends import Arguments, Backend, Stage
from dualpace.graphs.weights import LayerWeights, Weights

# The arguments of a stage that are matrices of a linear layer, and where the bias of each is.
_MATRICES: dict[str, dict[int, int | None]] = {
    "pre_layer": {},
    "pre_attention": {3: 4},
    "post_attention": {0: None, 2: None, 3: None},
    "output": {0: None},
    "mlp": {1: None, 2: None},
    "logits": {1: None},
    "post_layer_greedy": {1: None},
    "best": {1: None},
}

HEAD_STAGES = ("logits", "post_layer_greedy", "best")  # after the layers


def layer_arguments(stage: str, layer: LayerWeights, cos: Tensor, sin: Tensor) -> Arguments:
    """The weight arguments of a stage that has layers."""
    if stage == "pre_attention":
        norms = (layer.q_norm, layer.k_norm)
        return (cos, sin, layer.attn_norm, layer.qkv, layer.qkv_bias, *norms)
    if stage == "output":
        return (layer.o,)
    if stage == "mlp":
        return (layer.mlp_norm, layer.gate_up, layer.down)
    return (layer.o, layer.mlp_norm, layer.gate_up, layer.down)


def stage_arguments(stage: str, weights: Weights, cos: Tensor, sin: Tensor) -> list[Arguments]:
    """The weight arguments of every layer; a list of one where the stage has no layers."""
    if stage == "pre_layer":
        return [(weights.embed,)]
    if stage in HEAD_STAGES:
        return [(weights.final_norm, weights.head)]
    return [layer_arguments(stage, layer, cos, sin) for layer in weights.layers]


class Packer:
    """Puts the weights of stages into a backend's layout, each once however many stages share it.

    example: makes handles of nothing, for graphs that are compiled and not run.
    """

    def __init__(self, backend: Backend, example: bool = False) -> None:
        self._pack, self._whole, self._example = backend.pack, backend.whole, example
        # By identities of what was packed, which is kept.
        self._handles: dict[tuple[int, ...], tuple[Arguments, Tensor]] = {}

    def __call__(self, stage: str, function: Stage, arguments: Arguments) -> Arguments:
        """The weights of one layer for the executable of `function`, the stage of that name."""
        whole = self._whole
        if whole is not None and whole.takes(function, arguments):
            return (self._handle(arguments, lambda: whole.pack(function, arguments)),)
        pack = self._pack
        if pack is None:
            return arguments
        out = list(arguments)
        for place, bias_place in _MATRICES[stage].items():
            matrix = arguments[place]
            assert matrix is not None
            bias = None if bias_place is None else arguments[bias_place]
            if bias_place is not None:
                out[bias_place] = None
            out[place] = self._handle((matrix,), partial(pack, matrix, bias))
        return tuple(out)

    def _handle(self, packed: Arguments, make: Callable[[], Tensor]) -> Tensor:
        key = tuple(map(id, packed))
        if key not in self._handles:
            handle = torch.zeros((), dtype=torch.int64) if self._example else make()
            self._handles[key] = (packed, handle)
        return self._handles[key][1]
