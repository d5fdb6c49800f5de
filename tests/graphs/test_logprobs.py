"""Log-probabilities are those of the model, whatever is done to logits before a token is drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpace.graphs.logprobs import LogprobRows
from dualpace.graphs.sampling import SamplingRows, draw, sample
from tests.graphs.asked import Asked, edits_of
from tests.graphs.told import check, read

VOCAB = 300


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def asked(*rows: int, best: int) -> LogprobRows:
    return LogprobRows(torch.tensor(rows, dtype=torch.int64), best)


def warm(count: int) -> SamplingRows:
    return SamplingRows.of(
        torch.linspace(0, 2, count),
        torch.arange(count, dtype=torch.int32) % 5,
        torch.linspace(0.5, 1, count),
        torch.linspace(0, 0.999, count),
    )


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(0, 20), st.booleans(), st.integers(0, 99))
def test_they_are_those_of_raw_logits(
    data: st.DataObject, count: int, best: int, are_edited: bool, seed: int
) -> None:
    rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
    logits, how = logits_of(count, seed), warm(count)
    if are_edited:
        everything = Asked([5], [7, 7], 0.1, 0.5, 0.2, 1.4, {9: 20.0, 11: -torch.inf})
        how = replace(how, edits=edits_of(dict.fromkeys(range(0, count, 2), everything)))
    drawn = draw(logits.clone(), replace(how, logprobs=asked(*rows, best=best)))
    assert torch.equal(drawn.tokens, sample(logits.clone(), how)), "asking changes no token"
    assert drawn.logprobs is not None
    check(drawn.logprobs, logits[rows], drawn.tokens[rows], best)


def test_a_greedy_token_is_the_first_of_the_best() -> None:
    logits = logits_of(3)
    how = replace(SamplingRows.greedy(3), logprobs=asked(2, 0, best=3))
    assert not how.best_is_enough
    told = draw(logits, how).logprobs
    assert told is not None
    for row, place in zip(read(told), (2, 0), strict=True):
        assert row.tokens[0] == row.tokens[1] == int(logits[place].argmax())
        assert row.values[0] == row.values[1] and row.rank == 1


def test_a_row_is_told_the_same_in_every_company() -> None:
    logits, how = logits_of(40), warm(40)
    together = draw(logits, replace(how, logprobs=asked(*range(40), best=4)))
    assert together.logprobs is not None
    for row in range(0, 40, 7):
        alone = draw(logits, replace(how, logprobs=asked(row, best=4)))
        assert alone.logprobs is not None
        assert torch.equal(alone.logprobs[0], together.logprobs[row])


def test_rows_that_ask_nothing_are_told_nothing() -> None:
    assert draw(logits_of(2), warm(2)).logprobs is None


@pytest.mark.parametrize("scale", [0.0, 1e-3, 500.0])
def test_flat_and_steep_logits(scale: float) -> None:
    logits = scale * logits_of(2)
    how = replace(warm(2), logprobs=asked(0, 1, best=20))
    drawn = draw(logits, how)
    assert drawn.logprobs is not None
    wanted = torch.log_softmax(logits.double(), -1)
    for told, row in zip(read(drawn.logprobs), wanted, strict=True):
        got = torch.tensor(told.values).double()
        torch.testing.assert_close(got, row[told.tokens], atol=2e-4, rtol=1e-6)
