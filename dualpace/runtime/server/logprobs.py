"""The JSON of log-probabilities, in the two forms that OpenAI's routes have for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dualpace.runtime.alignment import LikelyToken, ToldToken

_LEAST = -9999.0  # OpenAI's for what is next to impossible; JSON knows no infinity


@dataclass(frozen=True, slots=True)
class LogprobForm:
    """What a request wants to see."""

    num_best: int
    as_ids: bool = False  # tokens are named `token_id:17`, as vLLM does it

    def completion(self, told: Sequence[ToldToken]) -> dict[str, Any]:
        """Parallel lists; the likeliest tokens by name, the generated one among them."""
        return {
            "text_offset": [each.start for each in told],
            "token_logprobs": [_logprob(each.drawn) for each in told],
            "tokens": [self._name(each.drawn) for each in told],
            "top_logprobs": [self._by_name(each) for each in told] if self.num_best else None,
        }

    def chat(self, told: Sequence[ToldToken]) -> dict[str, Any]:
        """An entry a token, the likeliest tokens in a list of its own."""
        content = [
            {**self._entry(each.drawn), "top_logprobs": [self._entry(one) for one in each.best]}
            for each in told
        ]
        return {"content": content, "refusal": None}

    def _name(self, token: LikelyToken) -> str:
        return f"token_id:{token.token_id}" if self.as_ids else token.name

    def _by_name(self, told: ToldToken) -> dict[str, float]:
        """Of several tokens with one name, such as parts of characters, the likeliest."""
        by_name: dict[str, float] = {}
        for token in (*told.best, told.drawn):
            by_name.setdefault(self._name(token), _logprob(token))
        return by_name

    def _entry(self, token: LikelyToken) -> dict[str, Any]:
        data = None if token.data is None else list(token.data)
        return {"token": self._name(token), "logprob": _logprob(token), "bytes": data}


def _logprob(token: LikelyToken) -> float:
    return max(token.logprob, _LEAST)
