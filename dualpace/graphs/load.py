"""Weights of a Source: safetensors folder, GGUF file or random numbers, packed as stages want them.

Files are mapped, never read whole; each part is written once, straight into its packed tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualpace.errors import ConfigError
from dualpace.graphs.gguf_file import GGUFFile
from dualpace.graphs.gguf_tensors import GGUFTensors
from dualpace.graphs.hf_config import read_json
from dualpace.graphs.models import family_of
from dualpace.graphs.models.family import TensorNames
from dualpace.graphs.source import Source
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.weights import (
    Weights,
    layer_shapes,
    make_layer,
    make_weights,
    random_weights,
    top_shapes,
)


class TensorFile(Protocol):
    """Named tensors of a checkpoint."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read_into(self, name: str, out: Tensor) -> None: ...


def load_weights(source: Source, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Load on the CPU in `dtype`; `seed` is that of random weights. ConfigError as in the file."""
    spec = source.spec
    if source.kind == "random":
        return random_weights(spec, dtype, seed)
    assert source.path is not None
    family = family_of(spec.architecture)
    if source.kind == "safetensors":
        return _assemble(spec, family.hf_names, SafetensorsFolder(source.path), dtype)
    weights = _assemble(spec, family.gguf_names, GGUFTensors(GGUFFile(source.path)), dtype)
    if family.gguf_permuted:
        for layer in weights.layers:
            unpermute_heads(layer.qkv[: spec.q_size], spec.head_dim)
            unpermute_heads(layer.qkv[spec.q_size : spec.q_size + spec.kv_size], spec.head_dim)
    return weights


def unpermute_heads(rows: Tensor, head_dim: int) -> None:
    """Reorder each head's rows in place, from (even, odd) RoPE pairs to (first, second) halves."""
    pairs = rows.view(-1, head_dim // 2, 2, rows.shape[1])
    rows.copy_(pairs.transpose(1, 2).reshape(rows.shape))


class SafetensorsFolder:
    """The tensors of one model.safetensors, or of the shards that an index lists."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            shards = sorted(set(read_json(index)["weight_map"].values()))
        else:
            shards = ["model.safetensors"]
        self._file_of = {name: file for file in map(self._open, shards) for name in file.keys()}  # noqa: SIM118

    def _open(self, shard: str) -> Any:  # safetensors has no annotations
        path = self._folder / shard
        if not path.is_file():
            raise ConfigError(f"{path} is missing; fetch the model again, in safetensors format")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ConfigError(f"{path} is damaged ({error}); fetch it again") from error

    def has(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        if not self.has(name):
            raise ConfigError(f"{self._folder} has no tensor {name}; it is not a complete model")
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read_into(self, name: str, out: Tensor) -> None:
        out.copy_(self._file_of[name].get_tensor(name))


def _assemble(spec: ModelSpec, names: TensorNames, file: TensorFile, dtype: torch.dtype) -> Weights:
    def read(parts: list[str], shape: tuple[int, ...]) -> Tensor:
        return _stack(file, parts, torch.empty(shape, dtype=dtype))

    top_names = dict(names.top)
    if spec.tied and not file.has(top_names["embed"]) and file.has(top_names["head"]):
        top_names["embed"] = top_names["head"]  # one table, kept under its other name
    top = {name: read([top_names[name]], shape) for name, shape in top_shapes(spec).items()}
    layers = []
    for index in range(spec.num_layers):
        prefix = names.layer_prefix.format(layer=index)
        layers.append(
            make_layer(
                {
                    name: read([prefix + part for part in names.layer[name]], shape)
                    for name, shape in layer_shapes(spec).items()
                }
            )
        )
    return make_weights(top, layers)


def _stack(file: TensorFile, parts: list[str], out: Tensor) -> Tensor:
    """Read `parts` one under the other into `out`."""
    shapes = [file.shape(part) for part in parts]
    rows = sum(shape[0] for shape in shapes)
    if rows != out.shape[0] or any(shape[1:] != tuple(out.shape[1:]) for shape in shapes):
        raise ConfigError(
            f"tensors {', '.join(parts)} have shapes {shapes}, the model's configuration asks for "
            f"{list(out.shape)} in all; the checkpoint and its configuration do not belong together"
        )
    start = 0
    for part, shape in zip(parts, shapes, strict=True):
        file.read_into(part, out[start : start + shape[0]])
        start += shape[0]
    return out
