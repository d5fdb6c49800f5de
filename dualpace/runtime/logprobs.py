"""Log-probabilities on their way from samplers to whoever asked: some rows of a batch, a few words
each, in one array of the message that brings the tokens.

Knows the words that `graphs/logprobs.py` writes, and no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualpace.runtime.messages import StepDone, Tokens
from dualpace.runtime.wire import I32


def num_words(best: int) -> int:
    """Of one row: tokens and log-probabilities of the drawn one and of the `best`, and a rank."""
    return 2 * (best + 1) + 1


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """What is told of one generated token, in natural logarithms."""

    token_id: int
    logprob: float
    rank: int  # 1: no token was likelier
    best: list[tuple[int, float]]  # likeliest tokens, first of all the best


def of_rows(told: StepDone, rows: Sequence[int]) -> tuple[I32, I32]:
    """(places among `rows` that are told, their words), as `Tokens` has them; `rows` of the batch,
    in ascending order."""
    if not len(told.asking):
        return told.asking, told.logprobs
    places = {row: place for place, row in enumerate(rows)}
    here = np.array([places.get(row, -1) for row in told.asking.tolist()], np.int32)
    words = told.logprobs.reshape(len(here), -1)
    return here[here >= 0], words[here >= 0].ravel()


def by_place(message: StepDone | Tokens) -> dict[int, TokenLogprobs]:
    """Place among the message's tokens -> what is told of it."""
    if not len(message.asking):
        return {}
    words = message.logprobs.reshape(len(message.asking), -1)
    width = (words.shape[1] - 1) // 2
    ids = words[:, :width].tolist()
    values = np.ascontiguousarray(words[:, width : 2 * width]).view(np.float32).tolist()
    told = zip(message.asking.tolist(), ids, values, words[:, -1].tolist(), strict=True)
    return {
        place: TokenLogprobs(
            row_ids[0], row_values[0], rank, list(zip(row_ids[1:], row_values[1:], strict=True))
        )
        for place, row_ids, row_values, rank in told
    }
