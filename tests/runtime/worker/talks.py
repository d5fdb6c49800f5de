"""Requests as the workers' tests hold them: tokens, blocks, and how the next token is asked for."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dualpace.runtime.engine.edits import Editor
from dualpace.runtime.engine.guides import Guide
from dualpace.runtime.logit_rules import LogitRules, words_of_mask
from dualpace.runtime.logprobs import TokenLogprobs


class Thirds:
    """A form: a token leaves the rest by 3 that the number of those before it does."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def accept_token(self, token_id: int) -> bool:
        accepts = token_id % 3 == self.num_tokens % 3
        self.num_tokens += accepts
        return accepts

    def fill_next_token_bitmask(self, bitmask: np.ndarray) -> bool:
        tokens = np.arange(bitmask.size * 32)
        bits = tokens % 3 == self.num_tokens % 3
        bitmask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    def is_completed(self) -> bool:
        return False


@dataclass
class Talk:
    """A request: prompt and output so far, and its blocks in the pool where it lives."""

    id: int
    tokens: list[int]
    temperature: float = 0.0
    blocks: list[int] = field(default_factory=list)
    rules: LogitRules = field(default_factory=LogitRules)  # set before the first step
    logprobs: int | None = None  # that it asks for
    vocab: int = 300
    told: list[TokenLogprobs] = field(default_factory=list)  # of each token of its output
    num_followed: int = 0  # tokens of its output that its form has been told

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @cached_property
    def editor(self) -> Editor:
        guide = Guide(Thirds(), words_of_mask(self.vocab)) if self.rules.structure else None
        return Editor(self.rules, self.prompt_len, (), guide)

    def catch_up(self) -> None:
        """Its form with its output."""
        guide, new = self.editor.guide, self.output[self.num_followed :]
        assert guide is None or all(guide.follow(token) for token in new)
        self.num_followed = len(self.output)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def uniform(self) -> float:
        return self.uniform_at(len(self.tokens))

    def uniform_at(self, position: int) -> float:
        return (self.id * 0.37 + position * 0.211) % 1.0
