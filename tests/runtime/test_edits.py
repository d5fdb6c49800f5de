"""A request's rules on their way into batches: what is due, counts, places, sizes."""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpace.block import BLOCK_TOKENS
from dualpace.runtime.engine.edits import Editor, encode_edits
from dualpace.runtime.engine.guides import Guide
from dualpace.runtime.logit_rules import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKENS,
    LogitRules,
    words_of_mask,
)
from dualpace.runtime.messages import Edits
from dualpace.runtime.structured import Structure
from dualpace.runtime.wiring import edits_bytes
from dualpace.runtime.worker.rows import edits_of

EOS = (2, 5)
PENALTIES = LogitRules(presence_penalty=0.5)


def read(encoded: np.ndarray, rows: list[int]) -> Edits | None:
    batch: Any = SimpleNamespace(edits=encoded)
    return edits_of(batch, np.array(rows, np.int64))


def pairs(editor: Editor, position: int) -> dict[int, float]:
    tokens, values = editor.bias(position)
    return dict(zip(tokens, values, strict=True))


def counts(editor: Editor, tokens: list[int]) -> dict[int, int]:
    return dict(zip(*editor.seen(tokens), strict=True))


def test_rules_travel_as_json() -> None:
    rules = LogitRules(
        min_p=0.1, frequency_penalty=-0.3, logit_bias={7: -100.0}, min_tokens=3, stop_token_ids=(9,)
    )
    asked = json.loads(json.dumps(rules.asked()))
    assert LogitRules.of(asked) == rules
    assert LogitRules().asked() == {} and LogitRules.of({}) == LogitRules()


@pytest.mark.parametrize(
    ("rules", "edits", "counts_tokens"),
    [
        ({}, False, False),
        ({"stop_token_ids": (3,)}, False, False),
        ({"min_tokens": 1}, True, False),
        ({"min_p": 0.1}, True, False),
        ({"logit_bias": {1: 0.0}}, True, False),
        ({"allowed_token_ids": (1,)}, True, False),
        ({"presence_penalty": -0.1}, True, True),
        ({"frequency_penalty": 0.1}, True, True),
        ({"repetition_penalty": 0.9}, True, True),
    ],
)
def test_who_edits_and_who_needs_the_last_token(
    rules: dict[str, Any], edits: bool, counts_tokens: bool
) -> None:
    made = LogitRules(**rules)
    assert (made.edits_logits, made.counts_tokens) == (edits, counts_tokens)


def test_an_answer_may_not_end_before_its_least_length() -> None:
    bias = {2: 5.0, 8: 1.0}
    editor = Editor(LogitRules(min_tokens=2, stop_token_ids=(6,), logit_bias=bias), 4, EOS)
    assert pairs(editor, 4) == pairs(editor, 5) == {2: -np.inf, 5: -np.inf, 6: -np.inf, 8: 1.0}
    assert pairs(editor, 6) == bias
    some = Editor(LogitRules(allowed_token_ids=(1, 2, 8), min_tokens=1, logit_bias=bias), 4, EOS)
    assert pairs(some, 4) == {1: 0, 2: -np.inf, 8: 1} and pairs(some, 5) == {1: 0, 2: 5, 8: 1}
    short = Editor(LogitRules(min_tokens=2), 4, EOS)
    assert [short.is_due(position) for position in (4, 5, 6)] == [True, True, False]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1), st.lists(st.integers(0, 6)), st.data())
def test_counts_are_those_of_the_tokens_whenever_they_are_asked_for(
    prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    editor = Editor(PENALTIES, len(prompt), EOS)
    asked = data.draw(st.lists(st.integers(0, len(output))))
    for length in [*sorted(asked), len(output)]:  # rounds that it was in
        found = counts(editor, prompt + output[:length])
        assert found == {**dict.fromkeys(prompt, 0), **Counter(output[:length])}


def test_without_penalties_nothing_is_counted() -> None:
    assert counts(Editor(LogitRules(min_p=0.2), 2, EOS), [1, 2, 3]) == {}


def test_a_batch_without_edits_says_nothing() -> None:
    assert len(encode_edits([])) == 0
    assert read(encode_edits([]), [0, 1]) is None


def test_rows_of_a_batch_are_told_by_their_places() -> None:
    one = Editor(PENALTIES, 1, EOS)
    two = Editor(LogitRules(min_p=0.25, logit_bias={7: 2.0}, allowed_token_ids=(7, 9)), 2, EOS)
    three = Editor(LogitRules(repetition_penalty=1.5, min_tokens=9), 1, EOS)
    encoded = encode_edits([(0, 3, one, [4, 4, 6]), (3, 2, two, [1, 1]), (5, 2, three, [8, 8])])
    assert read(encoded, [1, 2, 4]) is None
    found = read(encoded, [5, 1, 0])
    assert found is not None
    assert found.rows.tolist() == [2, 0]
    assert found.presence.tolist() == [0.5, 0] and found.repetition.tolist() == [1, 1.5]
    triples = zip(found.seen_owner, found.seen_token, found.seen_count, strict=True)
    assert [tuple(map(int, t)) for t in triples] == [(0, 4, 1), (0, 6, 1), (1, 8, 1)]
    assert found.only.tolist() == [0, 0]
    assert found.bias_owner.tolist() == [1, 1] and found.bias_token.tolist() == [2, 5]
    alone = read(encoded, [3])
    assert alone is not None
    assert alone.rows.tolist() == [0] and alone.min_p.tolist() == [0.25]
    assert alone.only.tolist() == [1]
    assert alone.bias_owner.tolist() == [0, 0] and alone.bias.tolist() == [2, 0]


class Scripted:
    """Lets through the tokens of each turn."""

    def __init__(self, turns: list[list[int]]) -> None:
        self.turns = turns

    def accept_token(self, token_id: int) -> bool:
        accepts = token_id in self.turns[0]
        self.turns = self.turns[accepts:]
        return accepts

    def fill_next_token_bitmask(self, bitmask: Any) -> bool:
        bitmask[:] = 0
        for token in self.turns[0] if self.turns else []:
            bitmask[0, token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        return True

    def is_completed(self) -> bool:
        return not self.turns[0]


def test_a_mask_is_that_of_the_tokens_so_far_and_goes_with_its_row() -> None:
    guide = Guide(Scripted([[1, 63], [31], [2, 5], []]), 2)
    guided = Editor(LogitRules(structure=Structure("regex", "x", "here")), 1, EOS, guide)
    assert guided.is_due(1) and guided.rules.needs_last_token and not guided.rules.counts_tokens
    other = Editor(LogitRules(min_p=0.5), 1, EOS)

    def masks() -> list[list[int]]:
        due = [(place, 1, editor, [7]) for place, editor in enumerate((other, guided, other))]
        found = read(encode_edits(due), [0, 1]), read(encode_edits(due), [2])
        assert all(edits is not None for edits in found)
        return [edits.masks.tolist() for edits in found if edits is not None]

    assert masks() == [[2, -(2**31)], []]
    assert not guide.follow(31) and guide.allows(63) and guide.follow(63)
    assert masks() == [[-(2**31), 0], []]
    assert guide.follow(31) and masks() == [[0b100100, 0], []]


@pytest.mark.parametrize(
    ("rules", "goes_on"),
    [
        ({}, [True, True, False]),
        ({"min_tokens": 2}, [True, False, False]),  # the second turn is the end's alone
        ({"min_tokens": 1, "stop_token_ids": (1,)}, [False, True, False]),
        ({"allowed_token_ids": (2, 9)}, [False, True, False]),
        ({"allowed_token_ids": (1, 9)}, [True, False, False]),
        ({"logit_bias": {1: -100.0}}, [True, True, False]),
    ],
)
def test_it_is_told_when_nothing_is_left(rules: dict[str, Any], goes_on: list[bool]) -> None:
    editor = Editor(LogitRules(**rules), 0, EOS, guide := Guide(Scripted([[1], [2], []]), 2))
    for position, expected in enumerate(goes_on):
        assert editor.can_go_on(position) == expected
        assert guide.follow(position + 1) == (position < 2)


def test_the_longest_edits_have_room() -> None:
    """Every row lists all that it may, and no token of its blocks comes twice."""
    rows, blocks = 3, 4
    vocab = 1001
    plan: Any = SimpleNamespace(model=SimpleNamespace(eos_token_ids=EOS, vocab=vocab))
    rules = LogitRules(
        presence_penalty=1.0,
        logit_bias={100 + i: 1.0 for i in range(MAX_LOGIT_BIAS)},
        min_tokens=10**6,
        stop_token_ids=tuple(range(10**4, 10**4 + MAX_STOP_TOKENS)),
    )
    tokens = list(range(blocks * BLOCK_TOKENS))
    guide = Guide(Scripted([]), words_of_mask(vocab))
    due = [(i, len(tokens), Editor(rules, 1, EOS, guide), tokens) for i in range(rows)]
    assert len(encode_edits(due)) <= edits_bytes(plan, rows, rows * blocks)
