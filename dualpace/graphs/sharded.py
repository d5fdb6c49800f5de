"""ShardedStages: the stages of one rank of several, called as those of a whole model.

Each rank runs its part of every product, and what they have to tell each other passes through the
collective between compiled pieces: sums of the rows that a batch has, never of padding, so that
ranks may run a batch on different buckets. All ranks make the same calls with the same rows; x and
tokens are then the same on all of them, bit by bit, and heads and logits are each rank's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualpace.graphs.collective import Collective
from dualpace.graphs.executor import Stages
from dualpace.graphs.sampling import SamplingRows, sample
from dualpace.graphs.table import StageTable


class ShardedStages(Stages):
    """Shapes as in stages.py, N and K being the heads of this rank."""

    def __init__(
        self, tables: dict[str, StageTable], collective: Collective, vocab: int, part: int
    ) -> None:
        """vocab: tokens of the model; part: rows of each rank's embedding and head."""
        super().__init__(tables)
        self._collective, self._vocab = collective, vocab
        self._first, self._part = collective.rank * part, part

    def bucket(self, num_rows: int) -> int:
        return self._tables["mlp"].padded(num_rows)

    def pre_layer(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]: each row from the rank that has it, zeros from the others."""
        rows = token_ids - self._first
        is_here = (rows >= 0) & (rows < self._part)
        x: Tensor = self._run("pre_layer", 0, rows.where(is_here, 0))
        return self._collective.all_reduce(x.mul_(is_here[:, None]))

    def post_attention(self, layer: int, attn: Tensor, x: Tensor) -> Tensor:
        """attn [T, N * D] of this rank's heads, x [T, H] -> x of the next layer [T, H]."""
        sums = self._collective.all_reduce(self._run("output", layer, attn))
        x, sums = self._run("mlp", layer, x, sums)
        return x.add_(self._collective.all_reduce(sums))

    def logits(self, x: Tensor) -> Tensor:
        """x [B, H] -> float32 [B, V], of all ranks."""
        return self._collective.all_gather(self._run("logits", 0, x))[:, : self._vocab]

    def post_layer(self, x: Tensor, rows: SamplingRows) -> Tensor:
        """x [B, H] and as many sampling rows -> token ids int32 [B]."""
        if not rows.best_is_enough:
            return sample(self.logits(x), rows)
        values, places = self._run("best", 0, x)
        return best_of_ranks(values, places + self._first, self._collective, self._vocab)


def best_of_ranks(values_B: Tensor, tokens_B: Tensor, collective: Collective, vocab: int) -> Tensor:
    """The token of the largest value of all ranks', the first rank's on a tie: int32 [B].

    values float32, tokens int32. Padding repeats the row of token vocab - 1, and so may stand for
    it.
    """
    both = torch.stack((values_B.view(torch.int32), tokens_B), dim=-1)
    of_ranks = collective.all_gather(both).view(len(both), -1, 2)
    values = of_ranks[..., 0].contiguous().view(torch.float32)
    first = values.argmax(dim=-1, keepdim=True)
    return of_ranks[..., 1].gather(1, first)[:, 0].clamp_max(vocab - 1)
