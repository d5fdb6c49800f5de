"""Sampling by inverse CDF: each row brings its own uniform number, no random state anywhere.

A row's token depends on its logits and its `SamplingRows` entry alone. Rows that ask for more than
temperature, top-k and top-p have their logits edited first (logit_edits.py).

Shape suffixes: B rows, V vocabulary, W candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualpace.graphs.logit_edits import LogitEdits, edit
from dualpace.graphs.logprobs import LogprobRows, RawLogits

# Candidates sorted before the whole vocabulary is: enough for nearly every top-k and top-p.
_FEW = 1024


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row is sampled; all tensors on the device of the logits."""

    temperature: Tensor  # float32 [B]; 0 takes the best token
    top_k: Tensor  # int32 [B]; 0 is off
    top_p: Tensor  # float32 [B]; 1 is off
    u: Tensor  # float32 [B], in [0, 1)
    all_greedy: bool = False  # every temperature is 0, known on the host
    no_filter: bool = False  # every top_k and top_p is off, known on the host
    edits: LogitEdits | None = None  # None: no row has any
    logprobs: LogprobRows | None = None  # None: no row asks

    @property
    def needs_logits(self) -> bool:
        """Whether some row's logits are edited or told about."""
        return self.edits is not None or self.logprobs is not None

    @property
    def best_is_enough(self) -> bool:
        """Whether each row takes the best token of its logits as they are, and tells no more."""
        return self.all_greedy and not self.needs_logits

    @classmethod
    def of(cls, temperature: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor) -> SamplingRows:
        """Rows of CPU tensors, with the two flags read from them."""
        sampled = temperature > 0
        filtered = sampled & ((top_k > 0) | (top_p < 1))
        return cls(temperature, top_k, top_p, u, not sampled.any(), not filtered.any())

    @classmethod
    def greedy(cls, num_rows: int, device: str | torch.device = "cpu") -> SamplingRows:
        """Rows that all take the best token."""
        zeros = torch.zeros(num_rows, device=device)
        return cls(zeros, zeros.int(), zeros + 1, zeros, all_greedy=True, no_filter=True)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a row, and what rows ask to know about theirs."""

    tokens: Tensor  # int32 [B]
    logprobs: Tensor | None = None  # int32 [Q, P] (logprobs.log_probabilities); None: nobody asks


def draw(logits_BV: Tensor, rows: SamplingRows) -> Drawn:
    """`sample`, with the log-probabilities that rows ask for."""
    if rows.logprobs is None:
        return Drawn(sample(logits_BV, rows))
    raw = RawLogits.of(logits_BV, rows.logprobs, rows.edits is not None)
    tokens_B = sample(logits_BV, rows)
    return Drawn(tokens_B, raw.told(tokens_B))


def sample(logits_BV: Tensor, rows: SamplingRows) -> Tensor:
    """One token a row: int32 [B]. Edits are carried out on `logits_BV` itself."""
    if rows.edits is not None:
        edit(logits_BV, rows.edits, rows.temperature)
    best_B = logits_BV.argmax(dim=-1)
    if rows.all_greedy:
        return best_B.int()
    temperature_B = torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    # Weights of at most 1: probabilities up to their sum, which the cumulative sum brings along.
    # In one tensor: a new one a pass would cost more than the arithmetic.
    weights_BV = logits_BV.float() - logits_BV.gather(1, best_B[:, None])
    weights_BV.div_(temperature_B).exp_()
    if not rows.no_filter:
        least_B = smallest_kept(weights_BV, rows.top_k, rows.top_p)
        weights_BV.masked_fill_(weights_BV < least_B[:, None], 0.0)
    cdf_BV = weights_BV.cumsum_(dim=-1)
    drawn_B = torch.searchsorted(cdf_BV, (rows.u * cdf_BV[:, -1])[:, None], right=True)[:, 0]
    return torch.where(rows.temperature > 0, drawn_B, best_B).int()


def smallest_kept(weights_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """The smallest weight of each row that top-k and top-p keep: float32 [B].

    A token is kept if fewer than top_k tokens outweigh it and the share of those that outweigh it
    is below top_p. Tokens of equal weight are kept together, whatever their order.
    """
    vocab = weights_BV.shape[-1]
    totals_B = weights_BV.sum(dim=-1)
    least_B, settled_B = _smallest_of(weights_BV, totals_B, top_k_B, top_p_B, min(_FEW, vocab))
    if vocab > _FEW and not bool(settled_B.all()):
        open_B = ~settled_B
        least_B[open_B] = _smallest_of(
            weights_BV[open_B], totals_B[open_B], top_k_B[open_B], top_p_B[open_B], vocab
        )[0]
    return least_B


def _smallest_of(
    weights_BV: Tensor, totals_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """(smallest kept weight among the `width` heaviest, whether that is the row's answer)."""
    heaviest_BW = weights_BV.topk(width, dim=-1).values
    ahead_BW = heaviest_BW.cumsum(dim=-1) - heaviest_BW
    rank_W = torch.arange(width, device=weights_BV.device)
    limit_B = torch.where(top_k_B > 0, top_k_B, weights_BV.shape[-1])
    mass_B = torch.where(top_p_B < 1, top_p_B * totals_B, torch.inf)
    kept_BW = (rank_W < limit_B[:, None]) & (ahead_BW < mass_B[:, None])
    kept_BW[:, 0] = True
    count_B = kept_BW.sum(dim=-1)
    return heaviest_BW.gather(1, count_B[:, None] - 1)[:, 0], count_B < width
