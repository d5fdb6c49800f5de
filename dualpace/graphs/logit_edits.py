"""What some rows have done to their logits before a token is drawn: masks, bans, biases, penalties,
min-p.

The order is the usual one: masks, bans and biases, repetition, frequency and presence penalties;
after temperature min-p, then top-k and top-p, which belong to sampling. Everything that depends on
a request's tokens is an argument, so a row is edited alike wherever it is sampled. Only rows that
ask are touched, and of them only the tokens that are named; plain torch operations, for every
device.

Shape suffixes: B rows, V vocabulary, P rows with edits, E pairs of a row and a token, M rows with
a mask, W words of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """All tensors on the device of the logits. `owner` says which of the P rows a pair belongs to;
    a row names no token twice within a list.
    """

    rows: Tensor  # int64 [P], of the batch, each once
    min_p: Tensor  # float32 [P]; 0 is off
    presence: Tensor  # float32 [P]; 0 is off
    frequency: Tensor  # float32 [P]; 0 is off
    repetition: Tensor  # float32 [P]; 1 is off
    bias_owner: Tensor  # int64 [E]
    bias_token: Tensor  # int64 [E]
    bias: Tensor  # float32 [E]; -inf forbids the token
    only: Tensor  # int64: rows of the batch of which no token is left but those with a bias
    seen_owner: Tensor  # int64 [E]
    seen_token: Tensor  # int64 [E], of prompt and output
    seen_count: Tensor  # float32 [E], times in the output; 0 where in the prompt alone
    any_min_p: bool  # known on the host
    masked: Tensor  # int64 [M], rows of the batch, each once
    masks: Tensor  # int32 [M, W]: token t is left where bit t % 32 of word t // 32 is set


def edit(logits_BV: Tensor, edits: LogitEdits, temperature_B: Tensor) -> None:
    """Carries out `edits` on float32 logits [B, V], in place. Waits for no device."""
    if len(edits.masked):
        logits_BV.index_add_(0, edits.masked, log_of(edits.masks, logits_BV.shape[-1]))
    if len(edits.bias):
        at = (edits.rows[edits.bias_owner], edits.bias_token)
        values_E = logits_BV[at] + edits.bias
        if len(edits.only):
            logits_BV.index_fill_(0, edits.only, -torch.inf)
        logits_BV.index_put_(at, values_E)
    if len(edits.seen_count):
        owner = edits.seen_owner
        at = (edits.rows[owner], edits.seen_token)
        values_E = penalised(
            logits_BV[at],
            edits.seen_count,
            edits.presence[owner],
            edits.frequency[owner],
            edits.repetition[owner],
        )
        logits_BV.index_put_(at, values_E)  # each place once: the order of writes does not matter
    if edits.any_min_p:
        best_P, temperature_P = logits_BV.amax(dim=-1)[edits.rows], temperature_B[edits.rows]
        least_B = torch.full_like(temperature_B, -torch.inf)
        least_B.index_put_((edits.rows,), least_logit(best_P, temperature_P, edits.min_p))
        logits_BV.masked_fill_(logits_BV < least_B[:, None], -torch.inf)


def log_of(masks_MW: Tensor, vocab: int) -> Tensor:
    """Logarithms of the first `vocab` bits of each mask, 0 or -inf: float32 [M, V].

    Looked up by bytes, which takes a fifth of the time that shifting bits does.
    """
    device = masks_MW.device
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    places = masks_MW.view(torch.uint8).flatten().int()
    return bits.float().log().index_select(0, places).view(len(masks_MW), -1)[:, :vocab]


def penalised(
    logits: Tensor, count: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Logits of tokens that occur in prompt or output, `count` times in the output; float32.

    Repetition divides a logit above 0 and multiplies one below; then `frequency` is taken off for
    each time in the output, and `presence` once if there is any.
    """
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - frequency * count - presence * (count > 0)


def least_logit(best: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit that min-p keeps: a token's probability at `temperature` is at least min_p
    times that of the best token, whose logit is `best`. -inf where min_p is 0; float32.
    """
    return torch.where(min_p > 0, best + temperature * min_p.log(), -torch.inf)
