"""Packed log-probabilities read back, and what torch says they should be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Told:
    """Of one row."""

    tokens: list[int]  # the drawn one, then the best
    values: list[float]
    rank: int


def read(packed: Tensor) -> list[Told]:
    """int32 [Q, 2 N + 3]."""
    width = (packed.shape[1] - 1) // 2
    return [
        Told(
            row[:width].tolist(),
            row[width : 2 * width].contiguous().view(torch.float32).tolist(),
            int(row[-1]),
        )
        for row in packed
    ]


def check(packed: Tensor, logits: Tensor, tokens: Tensor, best: int, atol: float = 1e-5) -> None:
    """Against `torch.log_softmax` of logits [Q, V], in float64, and the tokens drawn there."""
    wanted = torch.log_softmax(logits.double(), dim=-1)
    assert packed.dtype == torch.int32 and packed.shape == (len(logits), 2 * best + 3)
    for told, row, token in zip(read(packed), wanted, tokens.tolist(), strict=True):
        assert told.tokens[0] == token
        assert told.rank == 1 + int((row > row[token]).sum())
        torch.testing.assert_close(
            torch.tensor(told.values).double(), row[told.tokens], atol=atol, rtol=0
        )
        assert told.values[1:] == sorted(told.values[1:], reverse=True)
        assert len(set(told.tokens[1:])) == best
        top = row.topk(best).values
        torch.testing.assert_close(torch.tensor(told.values[1:]).double(), top, atol=atol, rtol=0)
