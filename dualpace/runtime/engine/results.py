"""What a round's tokens do to the conversations of its rows, and what the owner is told of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dualpace.runtime import logprobs, messages
from dualpace.runtime.engine.conversations import STUCK, Conversation
from dualpace.runtime.schedule.rounds import Row
from dualpace.runtime.types import Owner


@dataclass(frozen=True, slots=True)
class Taken:
    message: messages.Tokens | None  # None: no row has gained a token
    finished: list[Conversation]
    stuck: list[Conversation]  # their form knows no next token


def take_tokens(
    rows: Sequence[Row],
    done: messages.StepDone,
    first: int,
    owner: Owner,
    conversations: Mapping[int, Conversation],
    num_prompt_tokens: int,
) -> Taken:
    """Appends each row's token to its conversation. `rows` are those of the batch from `first`
    on."""
    ids, tokens, ends, places = [], [], [], []
    finished: list[Conversation] = []
    stuck: list[Conversation] = []
    sampled = done.tokens[first : first + len(rows)].tolist()
    for place, (row, token) in enumerate(zip(rows, sampled, strict=True), first):
        conversation = conversations.get(row.request.id)
        if not row.sample or conversation is None:  # cancelled, or ended one round earlier
            continue
        if (end := conversation.append(token)) == STUCK:
            stuck.append(conversation)
            end = messages.NOT_FINISHED
        elif end:
            finished.append(conversation)
        ids.append(row.request.id)
        tokens.append(token)
        ends.append(end)
        places.append(place)
    if not ids:
        return Taken(None, finished, stuck)
    message = messages.Tokens(
        np.array(ids, np.int64),
        np.array(tokens, np.int32),
        np.full(len(ids), owner, np.uint8),
        np.array(ends, np.uint8),
        time.monotonic(),
        num_prompt_tokens,
        *logprobs.of_rows(done, places),
    )
    return Taken(message, finished, stuck)
