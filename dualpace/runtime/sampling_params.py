"""How one request is sampled and when it ends: the same words offline and over HTTP. Plain data."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from dualpace.errors import ConfigError
from dualpace.runtime.logit_rules import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKENS,
    LogitRules,
)
from dualpace.runtime.sampling_types import wrong_type
from dualpace.runtime.structured import MalformedStructure, Structure, StructuredOutputsParams

MAX_STOPS = 16
MAX_BIAS = 100.0
MAX_LOGPROBS = 20  # likeliest tokens that a request may ask for
# Beyond these a draw cannot be told from the best token's or from an even one, and float32 cannot
# hold what logits become.
LEAST_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 100.0
MAX_REPETITION_PENALTY = 100.0  # and at least its inverse


class InvalidParameter(ConfigError):
    """A request says something that can never be done; `param` names what."""

    def __init__(self, param: str, text: str) -> None:
        super().__init__(text)
        self.param = param


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """Defaults are the OpenAI API's: temperature 1, everything else off.

    Penalties: presence and frequency look at the output, repetition at the prompt too. They, biases
    and min_tokens also bear on greedy decoding; min_p, top_k and top_p do not. Raises
    InvalidParameter (a ValueError) for values out of range or of other types.
    """

    temperature: float = 1.0  # 0, or too little to tell from it: always the most likely token
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # of the best token's probability, after temperature; 0: off
    presence_penalty: float = 0.0  # taken off the logit of a token that has come
    frequency_penalty: float = 0.0  # taken off for each time that it has come
    repetition_penalty: float = 1.0  # divides a positive logit, multiplies a negative one
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    allowed_token_ids: Sequence[int] = ()  # no others are drawn; empty: all
    seed: int | None = None  # None: another one each time
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0  # before these neither EOS, nor a stop token, nor a stop string ends it
    stop: str | tuple[str, ...] | list[str] = ()  # text ends before the first of these
    stop_token_ids: Sequence[int] = ()  # the answer ends with the first of these
    include_stop_str_in_output: bool = False  # text ends after what ended it, not before
    skip_special_tokens: bool = True  # False: text shows them
    logprobs: int | None = None  # tell each token's, and those of so many of the likeliest
    ignore_eos: bool = False
    structured_outputs: StructuredOutputsParams | None = None  # the form that the answer has

    def __post_init__(self) -> None:
        if (wrong := wrong_type(self)) is not None:
            raise InvalidParameter(*wrong)
        self._check_drawing()
        self._check_rules()
        self._check_end()
        self._structure()
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise self._out_of_range("logprobs", f"0 to {MAX_LOGPROBS}")

    def _check_drawing(self) -> None:
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise self._out_of_range("temperature", f"0 to {MAX_TEMPERATURE:g}")
        if not 0 < self.top_p <= 1:
            raise self._out_of_range("top_p", "more than 0, at most 1")
        if not -1 <= self.top_k < 2**31:
            raise self._out_of_range("top_k", f"0 for all tokens, or 1 to {2**31 - 1}")
        if not 0 <= self.min_p <= 1:
            raise self._out_of_range("min_p", "0 to 1")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidParameter("seed", f"seed={self.seed} does not fit into 64 bits.")

    def _check_rules(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise self._out_of_range(name, "-2 to 2")
        most = MAX_REPETITION_PENALTY
        if not 1 / most <= self.repetition_penalty <= most:
            raise self._out_of_range("repetition_penalty", f"{1 / most:g} to {most:g}, 1 for none")
        self._check_count("logit_bias", MAX_LOGIT_BIAS)
        self._check_count("allowed_token_ids", MAX_ALLOWED_TOKENS)
        for token, bias in self.logit_bias.items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise InvalidParameter(
                    "logit_bias",
                    f"logit_bias has {bias} for token {token}: use {-MAX_BIAS:g} to {MAX_BIAS:g}.",
                )

    def _check_end(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise self._out_of_range("max_tokens", "at least 1")
        limit = math.inf if self.max_tokens is None else self.max_tokens
        if not 0 <= self.min_tokens <= min(limit, 2**31 - 1):
            most = "" if self.max_tokens is None else f", at most max_tokens={self.max_tokens}"
            raise self._out_of_range("min_tokens", f"0 or more{most}")
        if len(self.stops) > MAX_STOPS:
            raise InvalidParameter(
                "stop", f"stop has {len(self.stops)} strings: use at most {MAX_STOPS}."
            )
        if "" in self.stops:
            raise InvalidParameter("stop", "stop holds an empty string: leave it out.")
        self._check_count("stop_token_ids", MAX_STOP_TOKENS)

    def _structure(self) -> Structure | None:
        form = self.structured_outputs
        try:
            return None if form is None else form.structure
        except MalformedStructure as error:
            assert form is not None
            raise InvalidParameter(form.asked_as, str(error)) from None

    def _check_count(self, name: str, limit: int) -> None:
        count = len(getattr(self, name))
        if count > limit:
            raise InvalidParameter(name, f"{name} has {count} tokens: use at most {limit}.")

    def _out_of_range(self, name: str, use: str) -> InvalidParameter:
        return InvalidParameter(name, f"{name}={getattr(self, name)} is out of range: use {use}.")

    def check_tokens(self, vocab: int, eos: Sequence[int]) -> None:
        """Raises InvalidParameter for a token that a model of `vocab` tokens does not have, and
        where none is left that may be drawn; `eos` are the model's."""
        named: dict[str, Any] = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "stop_token_ids": self.stop_token_ids,
        }
        for name, tokens in named.items():
            unknown = next((token for token in tokens if not 0 <= token < vocab), None)
            if unknown is not None:
                raise InvalidParameter(
                    name, f"{name} names token {unknown}: this model has 0 to {vocab - 1}."
                )
        if self.logprobs is not None and self.logprobs > vocab:
            raise self._out_of_range("logprobs", f"0 to {vocab}, as many as this model has tokens")
        allowed, ends = self.allowed_token_ids or range(vocab), {*eos, *self.stop_token_ids}
        if self.min_tokens and ends.issuperset(allowed):
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens={self.min_tokens} forbids every token that is allowed: each of them "
                "would end the answer.",
            )

    @property
    def drawn_at(self) -> float:
        """The temperature that logits are divided by; 0 takes the best token."""
        return self.temperature if self.temperature >= LEAST_TEMPERATURE else 0.0

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def rules(self) -> LogitRules:
        """What the engine has to know beside temperature, top-k and top-p."""
        return LogitRules(
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=tuple(self.allowed_token_ids),
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            structure=self._structure(),
        )

    def seeded(self, index: int = 0) -> Self:
        """These parameters with a seed; answer `index` to one prompt gets a seed of its own."""
        if self.seed is None:
            return replace(self, seed=secrets.randbits(63))
        seed = (self.seed + index + 2**63) % 2**64 - 2**63
        return replace(self, seed=seed)
