"""What callers from Python may give as prompts and as conversations, for no JSON model checks them.

Knows nothing about tokenizers or models.
"""

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from dualpace.runtime.sampling_params import InvalidParameter


def as_prompts(given: Any) -> list[str | list[int]]:
    """An entry a prompt; one string or one list of token ids is one prompt. Raises
    InvalidParameter for what is neither."""
    if isinstance(given, str):
        return [given]
    many = _listed(given)
    if many and isinstance(many[0], Integral):
        many = [many]
    return [one if isinstance(one, str) else _token_ids(one) for one in many]


def as_conversations(given: Any) -> list[list[Mapping[str, Any]]]:
    """A list of messages each; one such list is one conversation. Raises InvalidParameter for
    messages that are not two texts, `role` and `content`, which templates would print as they
    are."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise _no_message("", given)
    many = [given] if given and isinstance(given[0], Mapping) else given
    return [_conversation(one) for one in many]


def _listed(given: Any) -> list[Any]:
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        text = f"A prompt is a string or a list of token ids, not {reprlib.repr(given)}."
        raise InvalidParameter("prompt", text)
    return list(given)


def _token_ids(prompt: Any) -> list[int]:
    try:
        return [operator.index(token) for token in _listed(prompt)]
    except TypeError:
        text = f"A prompt has token ids, which are integers, not {reprlib.repr(prompt)}."
        raise InvalidParameter("prompt", text) from None


def _conversation(messages: Any) -> list[Mapping[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise _no_message("", messages)
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _no_message(f"[{at}]", message)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = reprlib.repr(message.get(key))
                text = f"messages[{at}][{key!r}] must be a string, not {found}."
                raise InvalidParameter("messages", text)
    return list(messages)


def _no_message(where: str, found: Any) -> InvalidParameter:
    what = "a dict with 'role' and 'content'" if where else "a list of one message or more"
    return InvalidParameter(
        "messages", f"messages{where} must be {what}, not {reprlib.repr(found)}."
    )
