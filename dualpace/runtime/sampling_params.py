"""How one request is sampled and when it ends: the same words offline and over HTTP. Plain data."""

import math
import secrets
from dataclasses import dataclass, replace
from typing import Self

from dualpace.errors import ConfigError

MAX_STOPS = 16


class InvalidParameter(ConfigError):
    """A request says something that can never be done; `param` names what."""

    def __init__(self, param: str, text: str) -> None:
        super().__init__(text)
        self.param = param


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """Defaults are the OpenAI API's: temperature 1, everything else off.

    Raises InvalidParameter (a ValueError) for values out of range.
    """

    temperature: float = 1.0  # 0: always the most likely token
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0 or -1: off
    seed: int | None = None  # None: another one each time
    max_tokens: int | None = 16  # None: until the context is full
    stop: str | tuple[str, ...] | list[str] = ()  # text ends before the first of these
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidParameter(
                "temperature", f"temperature={self.temperature} is out of range: use 0 or more."
            )
        if not 0 < self.top_p <= 1:
            raise InvalidParameter(
                "top_p", f"top_p={self.top_p} is out of range: use more than 0, at most 1."
            )
        if not -1 <= self.top_k < 2**31:
            raise InvalidParameter(
                "top_k",
                f"top_k={self.top_k} is out of range: use 0 for all tokens, or 1 to {2**31 - 1}.",
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidParameter(
                "max_tokens", f"max_tokens={self.max_tokens} is out of range: use at least 1."
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidParameter("seed", f"seed={self.seed} does not fit into 64 bits.")
        if len(self.stops) > MAX_STOPS:
            raise InvalidParameter(
                "stop", f"stop has {len(self.stops)} strings: use at most {MAX_STOPS}."
            )
        if "" in self.stops:
            raise InvalidParameter("stop", "stop holds an empty string: leave it out.")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def seeded(self, index: int = 0) -> Self:
        """These parameters with a seed; answer `index` to one prompt gets a seed of its own."""
        if self.seed is None:
            return replace(self, seed=secrets.randbits(63))
        seed = (self.seed + index + 2**63) % 2**64 - 2**63
        return replace(self, seed=seed)
