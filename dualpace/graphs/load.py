"""Weights of a Source: safetensors folder, GGUF file or random numbers, packed as stages want them.

Files are mapped, never read whole; each part is written once, straight into its packed tensor, or,
on its way to another device, into host memory that all tensors pass through. A rank of a
tensor-parallel group reads its own rows and columns alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualpace.errors import ConfigError, unreadable
from dualpace.graphs.gguf_tensors import GGUFTensors
from dualpace.graphs.hf_config import read_json
from dualpace.graphs.models import family_of
from dualpace.graphs.models.family import TensorNames
from dualpace.graphs.random_weights import random_weights
from dualpace.graphs.shard import WHOLE, Shard
from dualpace.graphs.source import Source
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


class TensorFile(Protocol):
    """Named tensors of a checkpoint."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read_into(self, name: str, out: Tensor, rows: range, columns: range | None) -> None:
        """Write these rows and columns (None: of a vector) to `out`, and read no others."""


def load_weights(
    source: Source,
    dtype: torch.dtype,
    seed: int = 0,
    shard: Shard = WHOLE,
    device: torch.device = CPU,
) -> Weights:
    """Load the shard's part on `device` in `dtype`; `seed` is that of random weights. ConfigError
    for a file that is damaged or does not belong to the source's configuration.
    """
    spec = source.spec
    if source.kind == "random":
        return random_weights(spec, dtype, seed, shard, device)
    family, new = family_of(spec.architecture), _maker(spec, shard, dtype, device)
    if source.kind == "safetensors":
        assert source.path is not None
        return _assemble(spec, shard, family.hf_names, SafetensorsFolder(source.path), new)
    assert source.file is not None
    weights = _assemble(spec, shard, family.gguf_names, GGUFTensors(source.file), new)
    if family.gguf_permuted:
        local = shard.local(spec)
        for layer in weights.layers:
            unpermute_heads(layer.qkv[: local.q_size + local.kv_size], spec.head_dim)
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
            shard_of = read_json(index).get("weight_map")
            if not isinstance(shard_of, dict):
                raise ConfigError(f"{index} has no weight_map; fetch the model again")
            for name, shard in shard_of.items():
                if not isinstance(shard, str):
                    text = f"{index} names {shard!r} for {name}, which is no file"
                    raise ConfigError(f"{text}; fetch the model again")
            shards = sorted(set(shard_of.values()))
        else:
            shards = ["model.safetensors"]
        self._file_of = {name: file for file in map(self._open, shards) for name in file.keys()}  # noqa: SIM118

    def _open(self, shard: str) -> Any:  # safetensors has no annotations
        path = self._folder / shard
        if not path.is_file():
            raise ConfigError(f"{path} is missing; fetch the model again, in safetensors format")
        try:
            path.open("rb").close()  # the library calls missing what it may not read
            return safe_open(path, framework="pt")
        except OSError as error:
            raise unreadable(path, error) from error
        except SafetensorError as error:
            raise ConfigError(f"{path} is damaged ({error}); fetch it again") from error

    def has(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        if not self.has(name):
            raise ConfigError(f"{self._folder} has no tensor {name}; it is not a complete model")
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read_into(self, name: str, out: Tensor, rows: range, columns: range | None) -> None:
        part = self._file_of[name].get_slice(name)
        if columns is None:
            out.copy_(part[rows.start : rows.stop])
        else:
            out.copy_(part[rows.start : rows.stop, columns.start : columns.stop])


# Makes a tensor of a shape, which the function given fills on the host.
Maker = Callable[[tuple[int, ...], Callable[[Tensor], None]], Tensor]


def _maker(spec: ModelSpec, shard: Shard, dtype: torch.dtype, device: torch.device) -> Maker:
    if device == CPU:

        def here(shape: tuple[int, ...], fill: Callable[[Tensor], None]) -> Tensor:
            out = torch.empty(shape, dtype=dtype)
            fill(out)
            return out

        return here
    largest = max(math.prod(cut.shape) for cut in cuts(spec, shard).values())
    passage = torch.empty(largest, dtype=dtype)  # pinned memory would never be given back

    def there(shape: tuple[int, ...], fill: Callable[[Tensor], None]) -> Tensor:
        host = passage[: math.prod(shape)].view(shape)
        fill(host)
        return host.to(device, copy=True)

    return there


def _assemble(
    spec: ModelSpec, shard: Shard, names: TensorNames, file: TensorFile, new: Maker
) -> Weights:
    parts = cuts(spec, shard)

    def read(name: str, stored: list[str], shape: tuple[int, ...]) -> Tensor:
        _check_shapes(file, stored, shape)
        return new(parts[name].shape, partial(_read_cut, file, stored, parts[name]))

    top_names = dict(names.top)
    if spec.tied and not file.has(top_names["embed"]) and file.has(top_names["head"]):
        top_names["embed"] = top_names["head"]  # one table, kept under its other name
    top = {name: read(name, [top_names[name]], shape) for name, shape in top_shapes(spec).items()}
    layers = []
    for index in range(spec.num_layers):
        prefix = names.layer_prefix.format(layer=index)
        layers.append(
            make_layer(
                {
                    name: read(name, [prefix + part for part in names.layer[name]], shape)
                    for name, shape in layer_shapes(spec).items()
                }
            )
        )
    return make_weights(top, layers)


def _check_shapes(file: TensorFile, stored: list[str], wanted: tuple[int, ...]) -> None:
    """ConfigError unless the tensors, one below the other, are of the shape that is wanted."""
    shapes = [file.shape(name) for name in stored]
    rows = sum(shape[0] for shape in shapes if shape)
    if rows != wanted[0] or any(shape[1:] != wanted[1:] for shape in shapes):
        raise ConfigError(
            f"tensors {', '.join(stored)} have shapes {shapes}, the model's configuration asks for "
            f"{list(wanted)} in all; the checkpoint and its configuration do not belong together"
        )


def _read_cut(file: TensorFile, stored: list[str], cut: Cut, out: Tensor) -> None:
    """Write the part of the tensors, one below the other, that the cut names."""
    done, first = 0, 0  # rows written, and rows before a stored tensor
    for name in stored:
        after = first + file.shape(name)[0]
        for rows in cut.rows:
            start, stop = max(rows.start, first), min(rows.stop, after)
            if start < stop:
                target = out[done : done + stop - start]
                file.read_into(name, target, range(start - first, stop - first), cut.columns)
                done += stop - start
        first = after
    out[done:] = out[done - 1 : done]
