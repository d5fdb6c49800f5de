"""Forms for tests: a token leaves a certain rest by 7, and an answer ends after so many."""

import asyncio
import threading
from collections.abc import Callable
from string import ascii_letters
from typing import Any

import numpy as np

from dualpace.runtime.engine.forms import FormRefused, Forms, FormsBusy
from dualpace.runtime.engine.guides import Guide
from dualpace.runtime.logit_rules import words_of_mask
from tests.runtime.engine.fake_workers import drawn_by, token

VOCAB = 512


def allowed(shift: int, place: int) -> list[int]:
    """Tokens at that place of the answer."""
    return list(range((shift + place) % 7, VOCAB, 7))


def expected(request_id: int, prompt_len: int, shift: int, length: int) -> list[int]:
    """What the played workers answer under that form."""
    wanted = [token(request_id, prompt_len + place) for place in range(length)]
    return [drawn_by(allowed(shift, place), one) for place, one in enumerate(wanted)]


class Sevens:
    """A matcher. With `dead_end` nothing may follow at last, and that is no end."""

    def __init__(self, shift: int, length: int, dead_end: bool, breaks: bool) -> None:
        self.shift, self.length, self.dead_end = shift, length, dead_end
        self.breaks = breaks
        self.num_tokens = 0

    def accept_token(self, token_id: int) -> bool:
        if self.breaks:
            raise RuntimeError("nested too deeply")
        accepts = token_id in allowed(self.shift, self.num_tokens)
        self.num_tokens += accepts
        return accepts

    def fill_next_token_bitmask(self, bitmask: Any) -> bool:
        bits = np.zeros(VOCAB, np.uint8)
        if self.num_tokens < self.length:
            bits[allowed(self.shift, self.num_tokens)] = 1
        bitmask[0] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    def is_completed(self) -> bool:
        return self.num_tokens == self.length and not self.dead_end


class SevensForm:
    def __init__(self, text: str, nbytes: int) -> None:
        self.text, self.nbytes = text, nbytes

    def guide(self) -> Guide:
        shift, length, *how = self.text.split()
        patience = {"patience_s": -1.0} if "tiring" in how else {}
        matcher = Sevens(int(shift), int(length), "dead-end" in how, "breaking" in how)
        return Guide(matcher, words_of_mask(VOCAB), **patience)


class SevensCompiler:
    """Of texts such as "3 40": a shift and a length, and perhaps "dead-end", "breaking" or
    "tiring": it takes too long to follow. "bad" is refused, "broken" meets an exception,
    "slow 3 40" waits until it may go on. What the trials below know is passed over."""

    def __init__(self, nbytes: int = 100) -> None:
        self.nbytes = nbytes
        self.compiled: list[str] = []
        self.may_go_on = threading.Event()

    def compile(self, kind: str, text: str) -> SevensForm:
        assert kind == "regex"
        self.compiled.append(text)
        if text == "bad":
            raise FormRefused("it is bad")
        if text == "broken":
            raise KeyError(text)
        if text.startswith("slow "):
            assert self.may_go_on.wait(60)
        return SevensForm(text.lstrip(ascii_letters + " "), self.nbytes)


class PlayedTrials:
    """A trial of "long 3 40" ends when it may, "crashing" is refused, and "lost 3 40" is not tried
    the first time: its process is lost."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.running: list[str] = []
        self.may_end = asyncio.Event()
        self.num_starts = 0
        self.is_closed = False

    async def start(self) -> None:
        self.num_starts += 1

    async def attempt(self, kind: str, text: str) -> None:
        self.tried.append(text)
        self.running.append(text)
        try:
            if text.startswith("long "):
                await self.may_end.wait()
            if text == "crashing":
                raise FormRefused("the library fails at it")
            if text.startswith("lost ") and self.tried.count(text) == 1:
                raise FormsBusy("it is lost")
        finally:
            self.running.remove(text)

    def close(self) -> None:
        self.is_closed = True


def forms_by(compiler: SevensCompiler) -> Callable[[object], Forms]:
    """For an engine."""
    return lambda model: Forms(lambda: compiler, PlayedTrials())
