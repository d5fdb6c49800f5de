"""Shard: which part of a model one rank of a tensor-parallel group holds. No torch.

Heads, the MLP's intermediate and the vocabulary are cut in equal contiguous parts, in the order of
the ranks. Knows nothing about files, devices or how ranks talk.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dualpace.errors import ConfigError
from dualpace.graphs.spec import ModelSpec

_VOCAB_MULTIPLE = 32  # rows of a rank's part of the vocabulary: what every product can cut evenly


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of `size`; all of the model if not said otherwise."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size

    def check(self, spec: ModelSpec, key: str) -> None:
        """ConfigError, naming `key`, for a model that cannot be cut in `size` equal parts."""
        counts = {
            "KV heads": spec.num_kv_heads,
            "query heads": spec.num_q_heads,
            "MLP columns": spec.intermediate,
        }
        whole = math.gcd(*counts.values())
        for name, count in counts.items():
            if count % self.size:
                sizes = [str(n) for n in range(1, whole + 1) if whole % n == 0]
                remedy = f"one of {', '.join(sizes)}" if len(sizes) > 1 else sizes[0]
                raise ConfigError(
                    f"{key}={self.size} and the model has {count} {name}, which that does not "
                    f"divide: set {key} to {remedy}."
                )

    def local(self, spec: ModelSpec) -> ModelSpec:
        """The sizes of this rank's part, the same on every rank: local heads, intermediate and
        vocabulary (padded). Hidden and head sizes stay.
        """
        if self.size == 1:
            return spec
        return dataclasses.replace(
            spec,
            num_q_heads=spec.num_q_heads // self.size,
            num_kv_heads=spec.num_kv_heads // self.size,
            intermediate=spec.intermediate // self.size,
            vocab=self._vocab_part(spec),
        )

    def q_heads(self, spec: ModelSpec) -> range:
        """This rank's query heads."""
        return self._part(spec.num_q_heads)

    def kv_heads(self, spec: ModelSpec) -> range:
        """This rank's key and value heads: those that its query heads attend to."""
        return self._part(spec.num_kv_heads)

    def intermediate(self, spec: ModelSpec) -> range:
        """This rank's columns of gate and of up, and rows of down's input."""
        return self._part(spec.intermediate)

    def vocab(self, spec: ModelSpec) -> range:
        """Token ids whose rows of embedding and head this rank has; fewer than `local` says, even
        none, where the last parts are padded.
        """
        part = self._vocab_part(spec)
        return range(min(self.rank * part, spec.vocab), min((self.rank + 1) * part, spec.vocab))

    def _vocab_part(self, spec: ModelSpec) -> int:
        if self.size == 1:
            return spec.vocab
        part = -(-spec.vocab // self.size)
        return -(-part // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE

    def _part(self, count: int) -> range:
        part = count // self.size
        return range(self.rank * part, (self.rank + 1) * part)


WHOLE = Shard()  # all of the model
