"""Stages: the object that a worker calls, one a device.

It finds the executable of a batch by its row count, pads where a worker has not done so, cuts a
batch above the largest bucket into pieces, and knows whether anything was compiled after ready.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dualpace.graphs.backends import Backend, Stage
from dualpace.graphs.buckets import bucket_of, pieces_of
from dualpace.graphs.sampling import SamplingRows, sample
from dualpace.graphs.weights import Weights

_Arguments = tuple[Tensor | None, ...]


class Stages:
    """Shapes as in stages.py: T rows, H hidden, N and K heads, D head size, B rows to sample."""

    def __init__(self, weights: Weights, cos: Tensor, sin: Tensor, backend: Backend) -> None:
        self.buckets: list[int] = []  # ascending; empty where any row count runs
        self._backend = backend
        self._graphs: dict[str, dict[int, Stage]] = {}
        self._compiles_at_ready = 0
        self._final: _Arguments = (weights.final_norm, weights.head)
        self._weights: dict[str, list[_Arguments]] = {
            "pre_layer": [(weights.embed,)],
            "pre_attention": [
                (cos, sin, w.attn_norm, w.qkv, w.qkv_bias, w.q_norm, w.k_norm)
                for w in weights.layers
            ],
            "post_attention": [(w.o, w.mlp_norm, w.gate_up, w.down) for w in weights.layers],
            "logits": [self._final],
            "post_layer_greedy": [self._final],
        }

    def weights_of(self, stage: str, layer: int) -> _Arguments:
        """The weight arguments of a stage, for layer 0 where it has no layers."""
        return self._weights[stage][layer]

    def add(self, stage: str, bucket: int, graph: Stage) -> None:
        """Serve batches of `bucket` rows (0: of any) with `graph` from now on."""
        self._graphs.setdefault(stage, {})[bucket] = graph
        if bucket and bucket not in self.buckets:
            self.buckets = sorted([*self.buckets, bucket])

    def ready(self) -> None:
        """From now on every compilation counts as one that a round had to wait for."""
        self._compiles_at_ready = self._backend.num_compiles()

    @property
    def compiles_after_ready(self) -> int:
        """Compilations since `ready`; anything but 0 is a defect."""
        return self._backend.num_compiles() - self._compiles_at_ready

    def bucket(self, num_rows: int) -> int:
        """Rows that a batch of `num_rows` is padded to; itself where it runs as it is."""
        if not self.buckets or num_rows > self.buckets[-1]:
            return num_rows
        return bucket_of(num_rows, self.buckets)

    @torch.inference_mode()
    def pre_layer(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]."""
        out: Tensor = self._run("pre_layer", 0, token_ids)
        return out

    @torch.inference_mode()
    def pre_attention(
        self, layer: int, x: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H], positions int64 [T] -> q [T, N, D], k [T, K, D], v [T, K, D]."""
        out: tuple[Tensor, Tensor, Tensor] = self._run("pre_attention", layer, x, positions)
        return out

    @torch.inference_mode()
    def post_attention(self, layer: int, attn: Tensor, x: Tensor) -> Tensor:
        """attn [T, N * D], x [T, H] -> x of the next layer [T, H]."""
        out: Tensor = self._run("post_attention", layer, attn, x)
        return out

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """x [B, H] -> float32 [B, V]."""
        out: Tensor = self._run("logits", 0, x)
        return out

    @torch.inference_mode()
    def post_layer(self, x: Tensor, rows: SamplingRows) -> Tensor:
        """x [B, H] and as many sampling rows -> token ids int32 [B]."""
        if rows.all_greedy:
            out: Tensor = self._run("post_layer_greedy", 0, x)
            return out
        return sample(self._run("logits", 0, x), rows)

    def _run(self, stage: str, layer: int, *rows: Tensor) -> Any:
        graphs, count = self._graphs[stage], rows[0].shape[0]
        graph = graphs.get(count) or graphs.get(0)
        weights = self._weights[stage][layer]
        if graph is not None:
            return graph(*rows, *weights)
        largest = self.buckets[-1]
        if count > largest:
            pieces = [[r[i:j] for r in rows] for i, j in pieces_of(count, largest)]
            return _join([self._run(stage, layer, *piece) for piece in pieces])
        bucket = bucket_of(count, self.buckets)
        return _cut(graphs[bucket](*(_pad(r, bucket) for r in rows), *weights), count)


def _pad(rows: Tensor, bucket: int) -> Tensor:
    return F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, bucket - rows.shape[0]])


def _cut(out: Any, count: int) -> Any:
    return tuple(o[:count] for o in out) if isinstance(out, tuple) else out[:count]


def _join(outs: list[Any]) -> Any:
    if isinstance(outs[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*outs, strict=True))
    return torch.cat(outs)
