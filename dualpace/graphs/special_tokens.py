"""What a model's vocabulary says beside its text. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Names by role (bos_token, eos_token, ...), the ids that are never text, the chat template."""

    names: Mapping[str, str]
    ids: frozenset[int]
    chat_template: str | None = None
