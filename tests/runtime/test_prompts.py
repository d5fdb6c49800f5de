"""Prompts and conversations as callers from Python give them."""

from typing import Any

import numpy as np
import pytest

from dualpace.runtime.prompts import as_conversations, as_prompts
from dualpace.runtime.sampling_params import InvalidParameter

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        ([[1], (2, 3), "c"], [[1], [2, 3], "c"]),
        ([], []),
        (["", []], ["", []]),  # of their length somebody else complains
    ],
)
def test_prompts(given: Any, prompts: Any) -> None:
    assert as_prompts(given) == prompts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "not None"),
        (5, "not 5"),
        (b"text", "not b'text'"),
        ({"prompt": "text"}, "not {'prompt': 'text'}"),
        ([{"prompt_token_ids": [1]}], "not {'prompt_token_ids': [1]}"),
        ([None], "not None"),
        ([1, 2.5], "not [1, 2.5]"),
        ([[1.0]], "not [1.0]"),
        ([["a"]], "not ['a']"),
    ],
)
def test_what_is_no_prompt_is_refused(given: Any, said: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        as_prompts(given)
    assert refused.value.param == "prompt"
    assert str(refused.value).startswith("A prompt ") and str(refused.value).endswith(f"{said}.")


def test_conversations() -> None:
    assert as_conversations([USER]) == as_conversations((USER,)) == [[USER]]
    assert as_conversations([[USER], [USER, USER]]) == [[USER], [USER, USER]]
    assert as_conversations([]) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "messages must be a list of one message or more, not None."),
        ("hi", "messages must be a list of one message or more, not 'hi'."),
        (USER, "messages must be a list of one message or more, not {"),
        ([[]], "messages must be a list of one message or more, not []."),
        ([USER, "hi"], "messages[1] must be a dict with 'role' and 'content', not 'hi'."),
        ([{"content": "hi"}], "messages[0]['role'] must be a string, not None."),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "must be a string, not "),
    ],
)
def test_what_no_template_could_print_is_refused(given: Any, said: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        as_conversations(given)
    assert refused.value.param == "messages" and said in str(refused.value)
