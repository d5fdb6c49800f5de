"""A model's weights as the stages want them: Q, K, V packed in one tensor, gate and up in another.

Every matrix is [out_features, in_features]. A rank of a tensor-parallel group has the rows of QKV
and gate-up, and the columns of O and down, that belong to its heads and its part of the MLP, and
its rows of embedding and head. Knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dualpace.graphs.shard import Shard
from dualpace.graphs.spec import ModelSpec

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}


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
    """The whole model, or a rank's part; `head` is `embed` itself where the two are tied."""

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


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a packed tensor, in rows and columns of the whole one."""

    rows: tuple[range, ...]  # one below the other
    columns: range | None  # None: of a vector
    padding: int = 0  # rows that repeat the last one

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        height = sum(map(len, self.rows)) + self.padding
        return (height,) if self.columns is None else (height, len(self.columns))


def cuts(spec: ModelSpec, shard: Shard) -> dict[str, Cut]:
    """The part that a rank has of every packed tensor of `spec`, the whole model's."""
    head, q, kv = spec.head_dim, shard.q_heads(spec), shard.kv_heads(spec)
    mlp, vocab = shard.intermediate(spec), shard.vocab(spec)
    columns = {"o": _times(q, head), "down": mlp}
    after_q, after_k = spec.q_size, spec.q_size + spec.kv_size
    qkv = (_times(q, head), _after(after_q, _times(kv, head)), _after(after_k, _times(kv, head)))
    # Padding repeats the last token's row, so that it can tie with that token and no more.
    table = (range(min(vocab.start, spec.vocab - 1), vocab.stop),)
    rows = {
        "qkv": qkv,
        "qkv_bias": qkv,
        "gate_up": (mlp, _after(spec.intermediate, mlp)),
        "embed": table,
        "head": table,
    }
    padding = dict.fromkeys(("embed", "head"), shard.local(spec).vocab - len(table[0]))
    found = {}
    for name, shape in (top_shapes(spec) | layer_shapes(spec)).items():
        whole = range(shape[1]) if len(shape) == 2 else None
        found[name] = Cut(
            rows.get(name, (range(shape[0]),)), columns.get(name, whole), padding.get(name, 0)
        )
    return found


def _times(part: range, width: int) -> range:
    return range(part.start * width, part.stop * width)


def _after(rows: int, part: range) -> range:
    return range(rows + part.start, rows + part.stop)


def make_layer(tensors: dict[str, Tensor]) -> LayerWeights:
    """A layer of the tensors that `layer_shapes` names."""
    return LayerWeights(**{f.name: tensors.get(f.name) for f in fields(LayerWeights)})  # type: ignore[arg-type]


def make_weights(top: dict[str, Tensor], layers: list[LayerWeights]) -> Weights:
    """A model of the tensors that `top_shapes` names."""
    head = top.get("head", top["embed"])
    return Weights(top["embed"], tuple(layers), top["final_norm"], head)
