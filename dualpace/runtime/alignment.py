"""Log-probabilities beside the text that their tokens make.

Text waits where a stop string may have begun, or for the rest of a character; what is told of its
tokens waits with it, and goes where it goes: a token that is cut off whole is not told. Knows
nothing about how either is sent.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from dualpace.runtime.logprobs import TokenLogprobs


class Spelling(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True, frozen=True)
class LikelyToken:
    token_id: int
    logprob: float
    name: str  # its spelling; U+FFFD where that is not whole characters
    data: bytes | None  # what it adds to the text; None: it is no text, whatever its name


@dataclass(slots=True, frozen=True)
class ToldToken:
    """A generated token, and the likeliest tokens in its place."""

    drawn: LikelyToken
    best: list[LikelyToken]
    start: int  # characters of the answer before it


class Alignment:
    """Of one answer: `add` each token, then `take` what has been shown."""

    def __init__(self, tokenizer: Spelling, num_best: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_best = num_best
        self._silent = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._num_chars = 0  # of the tokens so far
        self._num_shown = 0
        self._waiting: deque[ToldToken] = deque()

    def add(self, told: TokenLogprobs, num_chars: int, is_hidden: bool) -> None:
        """`num_chars`: how many characters the token has completed. `is_hidden`: it ends the answer
        and is no text."""
        drawn = self._likely(told.token_id, told.logprob, is_hidden)
        best = [self._likely(*pair) for pair in told.best[: self._num_best]]
        self._waiting.append(ToldToken(drawn, best, self._num_chars))
        self._num_chars += num_chars

    def take(self, num_shown: int, is_all: bool = False) -> list[ToldToken]:
        """What goes with the `num_shown` characters that are shown now; `is_all`: nothing that
        waits will be cut off."""
        self._num_shown += num_shown
        waiting, taken = self._waiting, []
        while waiting and (is_all or self._is_shown(waiting[0])):
            taken.append(waiting.popleft())
        return taken

    def _is_shown(self, told: ToldToken) -> bool:
        """One that is no text comes with the text before it."""
        is_silent = told.drawn.data is None
        return told.start < self._num_shown or (is_silent and told.start == self._num_shown)

    def _likely(self, token_id: int, logprob: float, is_hidden: bool = False) -> LikelyToken:
        data = self._tokenizer.token_bytes(token_id)
        is_text = not is_hidden and token_id not in self._silent
        return LikelyToken(
            token_id, logprob, data.decode(errors="replace"), data if is_text else None
        )
