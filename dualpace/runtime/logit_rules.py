"""What a request asks to have done to its logits: plain data, the same for client, server and
engine. `graphs/logit_edits.py` says what each rule means.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from dualpace.runtime.structured import Structure

MAX_LOGIT_BIAS = 300  # entries a request
MAX_ALLOWED_TOKENS = 300  # a request
MAX_STOP_TOKENS = 128  # a request


@dataclass(slots=True, frozen=True, kw_only=True)
class LogitRules:
    """Defaults do nothing."""

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # no others; empty: all
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end the answer; forbidden before `min_tokens`
    structure: Structure | None = None  # the form that the answer keeps to

    @property
    def counts_tokens(self) -> bool:
        """Whether what is done depends on how often each token has come."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def needs_last_token(self) -> bool:
        """Whether what is done depends on the tokens so far, the last one included."""
        return self.counts_tokens or self.structure is not None

    @property
    def edits_always(self) -> bool:
        """Whether logits are changed for every token."""
        listed = self.logit_bias or self.allowed_token_ids
        return bool(self.needs_last_token or self.min_p or listed)

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed for any token."""
        return bool(self.edits_always or self.min_tokens)

    def asked(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON can hold it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["logit_bias"] = list(self.logit_bias.items())
        return {name: value for name, value in values.items() if value != _UNASKED[name]}

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Self:
        """From what `asked` gave."""
        values = dict(asked)
        values["logit_bias"] = dict(values.get("logit_bias", ()))
        for name in ("allowed_token_ids", "stop_token_ids"):
            values[name] = tuple(values.get(name, ()))
        if values.get("structure"):
            values["structure"] = Structure(*values["structure"])
        return cls(**values)


def words_of_mask(vocab: int) -> int:
    """Of 32 bits each, for a bit a token."""
    return -(-vocab // 32)


_UNASKED: Mapping[str, Any] = {
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": [],
    "allowed_token_ids": (),
    "min_tokens": 0,
    "stop_token_ids": (),
    "structure": None,
}
