"""How far an answer has come in the form that it keeps to, and which tokens may come next.

Depends on the tokens that it was given and on nothing else, so it is right wherever the next one
is sampled, and after a recompute, a migration or a lost worker. Knows no library of grammars.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

_USUAL_S = 2e-3  # of the processor for a token: a hundred times what most forms take
_PATIENCE_S = 0.5  # beyond that, for all tokens of an answer


class Matcher(Protocol):
    """What an answer's tokens so far are matched with."""

    def accept_token(self, token_id: int) -> bool:
        """Goes on by a token; false, and nothing is changed, where that token may not come."""

    def fill_next_token_bitmask(self, bitmask: Any) -> bool:
        """Writes int32 [1, W], bit t % 32 of word t // 32 for token t."""

    def is_completed(self) -> bool:
        """Whether the answer may end here."""


class Guide:
    """One request's matcher, and the mask of its next token."""

    def __init__(self, matcher: Matcher, num_words: int, patience_s: float = _PATIENCE_S) -> None:
        self._matcher = matcher
        self._patience_s = patience_s
        self._masks = np.zeros((1, num_words), np.int32)
        matcher.fill_next_token_bitmask(self._masks)

    @property
    def mask(self) -> npt.NDArray[np.int32]:
        """int32 [W]: which tokens may come next, a bit each. A view: valid until `follow`."""
        mask: npt.NDArray[np.int32] = self._masks[0]
        return mask

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_completed()

    @property
    def is_too_slow(self) -> bool:
        """Whether its tokens take so long that others would wait for them. A form that can read one
        text in many ways, such as (x+x+)+y, takes longer with each."""
        return self._patience_s < 0

    def follow(self, token: int) -> bool:
        """Goes on by `token`; false where it may not come, or the matcher meets an error."""
        began_s = time.thread_time()
        try:
            accepts = self._matcher.accept_token(token)
            if accepts:
                self._matcher.fill_next_token_bitmask(self._masks)
        except RuntimeError:
            log.exception("a form cannot be followed further")
            return False
        self._patience_s -= max(0.0, time.thread_time() - began_s - _USUAL_S)
        return accepts

    @property
    def allows_any(self) -> bool:
        """Whether any token may come next."""
        return bool(self._masks.any())

    def allows(self, token: int) -> bool:
        return bool(self.mask[token // 32] >> token % 32 & 1)

    def allows_beside(self, banned: Iterable[int]) -> bool:
        """Whether any token but these may come next."""
        rest = self.mask.view(np.uint32).copy()
        for token in banned:
            rest[token // 32] &= ~np.uint32(1 << token % 32)
        return bool(rest.any())
