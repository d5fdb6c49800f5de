"""Weights of any shape from a seed, for models of which only the sizes are at hand."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dualpace.graphs.shard import WHOLE, Shard
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.weights import (
    CPU,
    Cut,
    Weights,
    cuts,
    layer_shapes,
    make_layer,
    make_weights,
    top_shapes,
)

# A prime length: rows of a tiled tensor then never start at the same place of the block twice.
_BLOCK = 4_194_301
_PIECE = 1 << 20  # elements of whole rows that are made at once to be cut


def random_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    seed: int = 0,
    shard: Shard = WHOLE,
    device: torch.device = CPU,
) -> Weights:
    """The shard's part of the same model in every process, made at the speed of memory.

    One block of normal numbers comes from a counter-based generator (Philox); every tensor is the
    block repeated from a place of its own. Activations keep the scale of a trained model's: a
    matrix has variance 1 / in_features.
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    size = min(_BLOCK, max(spec.num_parameters() // 4, 4096) | 1)
    unit = torch.from_numpy(generator.standard_normal(size, dtype=np.float32))
    blocks: dict[int, Tensor] = {}
    place = 0
    parts = cuts(spec, shard)

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        nonlocal place
        if name.endswith("norm"):
            return torch.ones(shape, dtype=dtype, device=device)
        fan_in = shape[1] if len(shape) == 2 else 100  # a bias: standard deviation 0.1
        if fan_in not in blocks:
            blocks[fan_in] = (unit / math.sqrt(fan_in)).to(dtype).to(device)
        place = (place + 1_000_003) % size
        return _cut(parts[name], shape, blocks[fan_in], place)

    top = {name: make(name, shape) for name, shape in top_shapes(spec).items()}
    layers = [
        make_layer({name: make(name, shape) for name, shape in layer_shapes(spec).items()})
        for _ in range(spec.num_layers)
    ]
    return make_weights(top, layers)


def _cut(cut: Cut, shape: tuple[int, ...], block: Tensor, place: int) -> Tensor:
    """The part of a tensor of `shape` that is `block` repeated from `place` on."""
    width = math.prod(shape[1:])
    columns = cut.columns or range(width)
    step = shape[0] if len(columns) == width else max(1, _PIECE // width)
    out = block.new_empty(cut.shape).view(-1, len(columns))
    done = 0
    for rows in cut.rows:
        for start in range(rows.start, rows.stop, step):
            count = min(step, rows.stop - start)
            target = out[done : done + count]
            if len(columns) == width:
                tile(target.view(-1), block, (place + start * width) % len(block))
            else:
                whole = block.new_empty(count, width)
                tile(whole.view(-1), block, (place + start * width) % len(block))
                target.copy_(whole[:, columns.start : columns.stop])
            done += count
    out[done:] = out[done - 1 : done]
    return out.view(-1) if cut.columns is None else out


def tile(out: Tensor, block: Tensor, start: int) -> None:
    """Fill 1-d `out` with `block` repeated, beginning at element `start` of it."""
    done = min(len(out), len(block) - start)
    out[:done] = block[start : start + done]
    while done < len(out):
        count = min(len(block), len(out) - done)
        out[done : done + count] = block[:count]
        done += count
