"""What the owner's metrics are told of prompts, besides their tokens. Decides nothing."""

import time
from collections.abc import Mapping

import numpy as np

from dualpace.runtime.engine.conversations import Conversation
from dualpace.runtime.messages import Scheduled
from dualpace.runtime.schedule.rounds import GpuStep


def first_scheduled(step: GpuStep, conversations: Mapping[int, Conversation]) -> Scheduled | None:
    """Whose first round `step` is, which has just been decided; None where nobody's. A request that
    is computed again has had its first."""
    prompts = [conversations[row.request.id] for row in step.prompt_rows]
    new = [conversation for conversation in prompts if not conversation.is_scheduled]
    if not new:
        return None
    for conversation in new:
        conversation.is_scheduled = True
    return Scheduled(
        np.array([conversation.request.id for conversation in new], np.int64),
        np.array([conversation.queued_s for conversation in new]),
        time.monotonic(),
    )


def prompt_tokens(step: GpuStep, conversations: Mapping[int, Conversation]) -> int:
    """Of the prompts whose first token `step`, about to be applied, has sampled."""
    return sum(
        row.request.prompt_len
        for row in step.prompt_rows
        if row.sample and not row.request.num_output and row.request.id in conversations
    )
