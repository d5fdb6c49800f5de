"""What a batch has drawn, on the host, as a message tells it: tokens, and a few words for each row
that asks for log-probabilities. numpy, once `on_host` has brought it here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from dualpace.graphs.sampling import Drawn
from dualpace.runtime.messages import no_words
from dualpace.runtime.worker.rows import Asking, Int32, Int64, SamplingArrays


@dataclass(slots=True, frozen=True)
class HostDrawn:
    """Of B rows, of which Q ask."""

    tokens: Int32  # [B]
    asking: Int32  # [Q], places of rows
    logprobs: Int32  # [Q * P], as many words each

    def among(self, num_rows: int, rows: Int64) -> Self:
        """The same by places among `num_rows` rows, of which `rows` were drawn; -1 elsewhere."""
        tokens = np.full(num_rows, -1, np.int32)
        tokens[rows] = self.tokens
        return replace(self, tokens=tokens, asking=rows[self.asking].astype(np.int32))


NOTHING = HostDrawn(no_words(), no_words(), no_words())


def on_host(drawn: Drawn, sampling: SamplingArrays) -> HostDrawn:
    """Waits for the device."""
    told = None if drawn.logprobs is None else drawn.logprobs.cpu().numpy()
    return host_drawn(drawn.tokens.cpu().numpy(), sampling.asking, told)


def host_drawn(tokens: Int32, asking: Asking | None, logprobs: Int32 | None) -> HostDrawn:
    """Of int32 [B], and [Q, P] where there are some who ask."""
    if asking is None or logprobs is None:
        return replace(NOTHING, tokens=tokens)
    return HostDrawn(tokens, asking.rows.astype(np.int32), logprobs.ravel())


def joined(parts: Sequence[HostDrawn]) -> HostDrawn:
    """Rows of several draws, one after another; those that ask are told equally many words."""
    starts = np.cumsum([0, *(len(part.tokens) for part in parts[:-1])])
    asking = [part.asking + start for part, start in zip(parts, starts, strict=True)]
    return HostDrawn(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate(asking).astype(np.int32),
        np.concatenate([part.logprobs for part in parts]),
    )
