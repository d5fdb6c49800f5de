"""Which weights each stage takes, in which layout: plain matrices, or handles of packed ones."""

from __future__ import annotations

import torch
from torch import Tensor

from dualpace.graphs.backends import Arguments, Pack
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
    """Puts matrices into one layout, each once however many stages share it."""

    def __init__(self, pack: Pack | None) -> None:
        self._pack = pack
        self._handles: dict[int, tuple[Tensor, Tensor]] = {}  # by identity, which the first keeps

    def __call__(self, stage: str, arguments: Arguments) -> Arguments:
        if self._pack is None:
            return arguments
        out = list(arguments)
        for place, bias_place in _MATRICES[stage].items():
            matrix = arguments[place]
            assert matrix is not None
            bias = None if bias_place is None else arguments[bias_place]
            if bias_place is not None:
                out[bias_place] = None
            out[place] = self._handle(self._pack, matrix, bias)
        return tuple(out)

    def _handle(self, pack: Pack, matrix: Tensor, bias: Tensor | None) -> Tensor:
        if id(matrix) not in self._handles:
            self._handles[id(matrix)] = (matrix, pack(matrix, bias))
        return self._handles[id(matrix)][1]


def no_pack(matrix: Tensor, bias: Tensor | None) -> Tensor:
    """A handle of nothing, for graphs that are compiled and not run."""
    return torch.zeros((), dtype=torch.int64)


def example_pack(pack: Pack | None) -> Pack | None:
    return None if pack is None else no_pack
