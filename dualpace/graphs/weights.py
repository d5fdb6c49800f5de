"""A model's weights as the stages want them: Q, K, V packed in one tensor, gate and up in another.

Every matrix is [out_features, in_features]. Knows nothing about files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from dualpace.graphs.spec import ModelSpec

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}

# A prime length: rows of a tiled tensor then never start at the same place of the block twice.
_RANDOM_BLOCK = 4_194_301


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. H hidden, N and K query and key heads, D head size, I intermediate."""

    attn_norm: Tensor  # [H]
    qkv: Tensor  # [(N + 2K) * D, H]
    qkv_bias: Tensor | None  # [(N + 2K) * D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Tensor  # [H, N * D]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2I, H]
    down: Tensor  # [H, I]


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model; `head` is `embed` itself where the two are tied."""

    embed: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [H]
    head: Tensor  # [V, H]

    def tensors(self) -> Iterator[Tensor]:
        """Every stored tensor once."""
        yield self.embed
        yield self.final_norm
        if self.head is not self.embed:
            yield self.head
        for layer in self.layers:
            for field in fields(layer):
                value = getattr(layer, field.name)
                if value is not None:
                    yield value

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


def top_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors outside the layers."""
    table = (spec.vocab, spec.hidden)
    return {"embed": table, "final_norm": (spec.hidden,)} | ({} if spec.tied else {"head": table})


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a layer of this model has."""
    rows = spec.q_size + 2 * spec.kv_size
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (spec.hidden,), "qkv": (rows, spec.hidden)}
    if spec.qkv_bias:
        shapes["qkv_bias"] = (rows,)
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    return shapes | {
        "o": (spec.hidden, spec.q_size),
        "mlp_norm": (spec.hidden,),
        "gate_up": (2 * spec.intermediate, spec.hidden),
        "down": (spec.hidden, spec.intermediate),
    }


def make_layer(tensors: dict[str, Tensor]) -> LayerWeights:
    """A layer of the tensors that `layer_shapes` names."""
    return LayerWeights(**{f.name: tensors.get(f.name) for f in fields(LayerWeights)})  # type: ignore[arg-type]


def make_weights(top: dict[str, Tensor], layers: list[LayerWeights]) -> Weights:
    """A model of the tensors that `top_shapes` names."""
    head = top.get("head", top["embed"])
    return Weights(top["embed"], tuple(layers), top["final_norm"], head)


def random_weights(spec: ModelSpec, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Weights of any shape, the same in every process, made at the speed of memory.

    One block of normal numbers comes from a counter-based generator (Philox); every tensor is the
    block repeated from a place of its own. Activations keep the scale of a trained model's: a
    matrix has variance 1 / in_features.
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    size = min(_RANDOM_BLOCK, max(spec.num_parameters() // 4, 4096) | 1)
    unit = torch.from_numpy(generator.standard_normal(size, dtype=np.float32))
    blocks: dict[int, Tensor] = {}
    place = 0

    def fill(shape: tuple[int, ...]) -> Tensor:
        nonlocal place
        fan_in = shape[1] if len(shape) == 2 else 100  # a bias: standard deviation 0.1
        if fan_in not in blocks:
            blocks[fan_in] = (unit / math.sqrt(fan_in)).to(dtype)
        tensor = torch.empty(shape, dtype=dtype)
        place = (place + 1_000_003) % size
        tile(tensor.view(-1), blocks[fan_in], place)
        return tensor

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.ones(shape, dtype=dtype) if name.endswith("norm") else fill(shape)

    top = {name: make(name, shape) for name, shape in top_shapes(spec).items()}
    layers = [
        make_layer({name: make(name, shape) for name, shape in layer_shapes(spec).items()})
        for _ in range(spec.num_layers)
    ]
    return make_weights(top, layers)


def tile(out: Tensor, block: Tensor, start: int) -> None:
    """Fill 1-d `out` with `block` repeated, beginning at element `start` of it."""
    done = min(len(out), len(block) - start)
    out[:done] = block[start : start + done]
    while done < len(out):
        count = min(len(block), len(out) - done)
        out[done : done + count] = block[:count]
        done += count
