"""Log-probabilities of drawn tokens and of the likeliest ones, for the rows that ask.

They are those of the model: log-softmax of the logits as they come, before edits, temperature and
truncation. Plain torch operations, which wait for no device; a row's numbers depend on its logits
and its token alone.

Shape suffixes: B rows, V vocabulary, Q rows that ask, C of these at once, N best tokens,
P = 2 N + 3 words of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_AT_ONCE = 16  # rows whose logits are copied at a time: bounds memory, and stays in a CPU's cache


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Who asks, and for how much."""

    rows: Tensor  # int64 [Q], of the batch, each once, on the device of the logits
    best: int  # N: likeliest tokens that are told beside the drawn one


@dataclass(frozen=True, slots=True)
class RawLogits:
    """The logits of rows that ask, as they were before edits."""

    asked: LogprobRows
    logits: Tensor  # float32 [B, V] or [Q, V]
    places: Tensor  # int64 [Q]: where in them each asking row is

    @classmethod
    def of(cls, logits_BV: Tensor, asked: LogprobRows, are_edited: bool) -> Self:
        """`are_edited`: float32 `logits_BV` will be changed in place, so a copy is kept."""
        if not are_edited:
            return cls(asked, logits_BV, asked.rows)
        places_Q = torch.arange(len(asked.rows), device=logits_BV.device)
        return cls(asked, logits_BV.index_select(0, asked.rows), places_Q)

    def told(self, tokens_B: Tensor) -> Tensor:
        """What is told of the drawn tokens, int32 [B]: `log_probabilities`."""
        tokens_Q = tokens_B.index_select(0, self.asked.rows)
        return log_probabilities(self.logits, self.places, tokens_Q, self.asked.best)


def log_probabilities(logits_BV: Tensor, rows_Q: Tensor, tokens_Q: Tensor, best: int) -> Tensor:
    """Of rows of float32 logits and the tokens that were drawn there: int32 [Q, P].

    In a row's words: N + 1 tokens, the drawn one and the best, likeliest first; the bits of their
    float32 log-probabilities; the drawn token's rank, 1 if no other was likelier.
    """
    pieces = zip(rows_Q.split(_AT_ONCE), tokens_Q.split(_AT_ONCE), strict=True)
    return torch.cat(
        [_packed(logits_BV.index_select(0, rows), tokens, best) for rows, tokens in pieces]
    )


def _packed(logits_CV: Tensor, tokens_C: Tensor, best: int) -> Tensor:
    drawn_C1 = tokens_C.long()[:, None]
    drawn_logit_C1 = logits_CV.gather(1, drawn_C1)
    rank_C1 = (logits_CV > drawn_logit_C1).sum(dim=-1, keepdim=True) + 1
    best_logit_CN, best_CN = logits_CV.topk(best, dim=-1)
    total_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
    values = torch.cat([drawn_logit_C1, best_logit_CN], dim=1) - total_C1
    words = [drawn_C1.int(), best_CN.int(), values.view(torch.int32), rank_C1.int()]
    return torch.cat(words, dim=1)
