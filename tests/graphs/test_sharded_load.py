"""Weights of the ranks put together are those of one rank, and no rank reads what is another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dualpace.graphs import load
from dualpace.graphs.gguf_tensors import GGUFTensors
from dualpace.graphs.load import SafetensorsFolder, load_weights
from dualpace.graphs.shard import Shard
from dualpace.graphs.source import Source, resolve_source
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.weights import Weights
from tests.graphs.reference import SIZES, save_tiny
from tests.graphs.test_gguf import write_gguf

FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
}


def joined(parts: list[Weights], spec: ModelSpec) -> dict[str, Tensor]:
    """The tensors of a whole model from those of its ranks."""
    found = {"final_norm": parts[0].final_norm}
    for name in ("embed", "head"):
        found[name] = torch.cat([getattr(part, name) for part in parts])[: spec.vocab]
    local = Shard(0, len(parts)).local(spec)
    sizes = (local.q_size, local.kv_size, local.kv_size)
    for index in range(spec.num_layers):
        layers = [part.layers[index] for part in parts]
        for name, split in (
            ("qkv", sizes),
            ("qkv_bias", sizes),
            ("gate_up", (local.intermediate,) * 2),
        ):
            tensors = [getattr(layer, name) for layer in layers]
            if tensors[0] is not None:
                pieces = zip(*(tensor.split(split) for tensor in tensors), strict=True)
                found[f"{index} {name}"] = torch.cat([part for piece in pieces for part in piece])
        for name in ("o", "down"):
            found[f"{index} {name}"] = torch.cat([getattr(layer, name) for layer in layers], 1)
        for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):
            if getattr(layers[0], name) is not None:
                found[f"{index} {name}"] = getattr(layers[-1], name)
    return found


def check(source: Source, size: int, dtype: torch.dtype = torch.float32) -> list[Weights]:
    parts = [load_weights(source, dtype, shard=Shard(rank, size)) for rank in range(size)]
    got = joined(parts, source.spec)
    for name, tensor in joined([load_weights(source, dtype)], source.spec).items():
        assert torch.equal(got[name], tensor), name
    return parts


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, FAMILIES[family], shard="40KB")
    check(resolve_source(str(tmp_path)), 2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = ModelSpec.from_dict(
        {
            "architecture": "Qwen2ForCausalLM",
            "hidden": 96,
            "num_layers": 2,
            "num_q_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 12,
            "intermediate": 20_000,  # pieces of whole rows are made one after another
            "vocab": 100,
            "max_context": 64,
            "qkv_bias": True,
        }
    )
    parts = check(Source("random", None, spec, "random"), size, dtype)
    padded = parts[-1].embed
    assert len(padded) * size >= 100 and padded.shape == parts[0].embed.shape
    assert torch.equal(padded[-1], padded[100 - (size - 1) * len(padded) - 1 :][0])


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "random"])
def test_weights_on_another_device_are_the_same(kind: str, tmp_path: Path) -> None:
    """What a file holds passes through one piece of host memory; "cpu:0" is another than "cpu"."""
    model, path = save_tiny(tmp_path, FAMILIES["llama"]), tmp_path
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, model, "llama")
    source = resolve_source(str(path))
    if kind == "random":
        source = Source("random", None, source.spec, "random")
    shard = Shard(1, 2)
    wanted, got, elsewhere = (
        load_weights(source, torch.float32, 3, shard, torch.device(device))
        for device in ("cpu", "cpu:0", "meta")
    )
    both = zip(got.tensors(), wanted.tensors(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)
    assert all(tensor.is_meta for tensor in elsewhere.tensors())


class Counting:
    """A TensorFile that counts the elements asked for, by tensor."""

    def __init__(self, file: Any, counts: dict[str, int]) -> None:
        self._file, self._counts = file, counts
        self.has, self.shape = file.has, file.shape

    def read_into(self, name: str, out: Tensor, rows: range, columns: range | None) -> None:
        count = len(rows) * (1 if columns is None else len(columns))
        assert out.numel() == count
        self._counts[name] = self._counts.get(name, 0) + count
        self._file.read_into(name, out, rows, columns)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_matrices_are_read_once_over_all_ranks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(tmp_path, FAMILIES["llama"])
    path = tmp_path
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, model, "llama")
    source = resolve_source(str(path))
    counts: dict[str, int] = {}
    for name, file in (("SafetensorsFolder", SafetensorsFolder), ("GGUFTensors", GGUFTensors)):
        monkeypatch.setattr(load, name, lambda place, file=file: Counting(file(place), counts))
    for rank in range(2):
        load_weights(source, torch.float32, shard=Shard(rank, 2))
    stored = sum(parameter.numel() for parameter in model.parameters())
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert sum(counts.values()) == stored + norms


def test_ranges_of_a_safetensors_file_are_slices_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, FAMILIES["llama"])

    class NoWholeTensor:
        def __init__(self, file: Any) -> None:
            self.keys, self.get_slice = file.keys, file.get_slice

    opened = SafetensorsFolder._open
    monkeypatch.setattr(
        SafetensorsFolder, "_open", lambda self, shard: NoWholeTensor(opened(self, shard))
    )
    load_weights(resolve_source(str(tmp_path)), torch.float32, shard=Shard(1, 2))
