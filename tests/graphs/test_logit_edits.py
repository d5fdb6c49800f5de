"""Edits of logits against transformers' own processors, and each by its definition."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpace.graphs.logit_edits import edit, least_logit, penalised
from dualpace.graphs.sampling import SamplingRows, sample
from dualpace.runtime.sampling_params import (
    LEAST_TEMPERATURE,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
)
from tests.graphs.asked import Asked, edits_of

VOCAB = 40


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def edited(logits: torch.Tensor, asked: dict[int, Asked], heat: float = 1.0) -> torch.Tensor:
    logits = logits.clone()
    edit(logits, edits_of(asked), torch.full((len(logits),), heat))
    return logits


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(max_examples=60, deadline=None)
@given(tokens.filter(bool), tokens, st.floats(0.2, 3.0), st.integers(0, 99))
def test_repetition_is_that_of_transformers(
    prompt: list[int], output: list[int], penalty: float, seed: int
) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = logits_of(1, seed)
    asked = Asked(prompt, output, repetition=penalty)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), logits.clone()
    )
    torch.testing.assert_close(edited(logits, {0: asked}), wanted)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.001, 1.0), st.floats(0.1, 3.0), st.integers(0, 99))
def test_min_p_is_that_of_transformers(min_p: float, heat: float, seed: int) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper

    logits = logits_of(1, seed)
    scores = TemperatureLogitsWarper(heat)(None, logits.clone())  # type: ignore[arg-type]
    chances = scores.double().softmax(-1)
    border = (chances / chances.max() - min_p).abs() < 1e-5  # rounding decides there
    wanted = MinPLogitsWarper(min_p)(None, scores).isinf()  # type: ignore[arg-type]
    got = edited(logits, {0: Asked(min_p=min_p)}, heat)
    assert torch.equal(got.isinf() | border, wanted | border)
    assert torch.equal(got[~got.isinf()], logits[~got.isinf()])


def test_bans_and_biases_are_those_of_transformers() -> None:
    from transformers import MinNewTokensLengthLogitsProcessor, SequenceBiasLogitsProcessor

    logits, bias, stops = logits_of(1), {3: 2.5, 9: -100.0, 11: 100.0}, [5, 7]
    scores = SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()])(
        torch.tensor([[1]]), logits.clone()
    )
    wanted = MinNewTokensLengthLogitsProcessor(1, 4, stops)(torch.tensor([[1]]), scores)
    banned = dict.fromkeys(stops, -torch.inf)
    torch.testing.assert_close(edited(logits, {0: Asked(bias=bias | banned)}), wanted)


@settings(max_examples=60, deadline=None)
@given(tokens, tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_look_at_the_output_alone(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    logits, counts = logits_of(1), Counter(output)
    got = edited(logits, {0: Asked(prompt, output, presence=presence, frequency=frequency)})
    wanted = [
        float(logit) - frequency * counts[token] - presence * (counts[token] > 0)
        for token, logit in enumerate(logits[0])
    ]
    torch.testing.assert_close(got[0], torch.tensor(wanted))


def test_the_order_is_bias_repetition_counts_temperature_min_p() -> None:
    logits = torch.full((1, VOCAB), -20.0)
    logits[0, :4] = torch.tensor([1.0, 2.0, -1.0, 0.5])
    asked = Asked([0], [1, 1], 0.4, 0.25, 0.5, 2.0, {0: 3.0, 2: 4.0, 3: -torch.inf})
    got = edited(logits, {0: asked}, heat=2.0)[0]
    # 0: (1 + 3) / 2; 1: 2 / 2 - 2 * 0.5 - 0.25; 2: -1 + 4, the best: 0.4 of it ends at 1.17
    assert got[:4].tolist() == [2.0, -torch.inf, 3.0, -torch.inf]
    assert got[4:].isinf().all()


def test_only_what_is_listed_is_left() -> None:
    logits = logits_of(3)
    got = edited(logits, {2: Asked(bias={4: 0.0, 9: 1.5}, only=True), 0: Asked(bias={4: 0.0})})
    assert (got[2] > -torch.inf).nonzero().flatten().tolist() == [4, 9]
    assert got[2, [4, 9]].tolist() == (logits[2, [4, 9]] + torch.tensor([0, 1.5])).tolist()
    assert torch.equal(got[:2], logits[:2])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1), min_size=1, max_size=3))
def test_a_mask_leaves_what_a_list_of_allowed_tokens_leaves(left: list[list[int]]) -> None:
    logits = logits_of(4)
    bias = {1: 0.5, VOCAB - 1: -torch.inf}
    masked = {3 - i: Asked(bias=bias, left=tokens) for i, tokens in enumerate(left)}
    listed = {
        3 - i: Asked(bias={t: bias.get(t, 0.0) for t in tokens}, only=True)
        for i, tokens in enumerate(left)
    }
    assert torch.equal(edited(logits, masked), edited(logits, listed))


def test_rows_without_edits_keep_every_bit() -> None:
    logits = logits_of(4)
    everything = Asked([1], [2, 3, 3], 0.3, 1.0, 0.5, 1.3, {4: 2.0})
    got = edited(logits, {2: everything, 0: Asked(bias={5: 1.0})})
    assert torch.equal(got[[1, 3]], logits[[1, 3]])
    assert torch.equal(got[2], edited(logits[2:3], {0: everything})[0])  # whatever its company
    assert int((got[0] != logits[0]).sum()) == 1


def test_greedy_rows_take_the_best_edited_token() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 3], logits[:, 8] = 2.0, 1.5
    rows = SamplingRows.greedy(2)
    asked = edits_of({1: Asked([9], [3], presence=1.0, min_p=1.0)})
    how = SamplingRows(rows.temperature, rows.top_k, rows.top_p, rows.u, True, True, asked)
    assert not how.best_is_enough and rows.best_is_enough
    assert sample(logits, how).tolist() == [3, 8]


def test_what_min_p_leaves_is_what_top_p_is_a_part_of() -> None:
    """Weights 1, 0.5, 0.25, 0.25: min-p takes the last two; 0.7 of the rest is the best alone only
    when the last two no longer count."""
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, :4] = torch.tensor([1.0, 0.5, 0.25, 0.25]).log()
    one, nearly = torch.ones(1), torch.tensor([0.999])
    plain = SamplingRows.of(one, torch.zeros(1, dtype=torch.int32), one * 0.66, nearly)
    asked = edits_of({0: Asked(min_p=0.4)})
    cut = SamplingRows(plain.temperature, plain.top_k, plain.top_p, plain.u, edits=asked)
    assert [int(sample(logits.clone(), how)) for how in (plain, cut)] == [1, 0]


@pytest.mark.parametrize("min_p", [0.0, 1.0])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_the_ends_of_min_p(min_p: float, heat: float) -> None:
    best = torch.tensor([3.0])
    least = float(least_logit(best, torch.tensor([heat]), torch.tensor([min_p])))
    assert least == (3.0 if min_p else -torch.inf)


def test_a_forbidden_token_stays_forbidden() -> None:
    inf, one = torch.tensor([-torch.inf]), torch.ones(1)
    assert float(penalised(inf, one * 3, one * -2, one * -2, one * 0.1)) == -torch.inf


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(st.just(0.0), st.floats(LEAST_TEMPERATURE, MAX_TEMPERATURE)),
    st.floats(1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    st.floats(0.0, 1.0, width=32),
    st.floats(0.0, 1.0, width=32, exclude_min=True),
    st.integers(0, VOCAB),
    st.floats(0.0, 1.0, width=32, exclude_max=True),
    st.floats(-1e4, 1e4, width=32),
)
def test_whatever_is_asked_a_token_that_is_allowed_is_drawn(
    temperature: float, penalty: float, min_p: float, top_p: float, top_k: int, u: float, far: float
) -> None:
    logits = logits_of(1) + far
    one = torch.ones(1)
    plain = SamplingRows.of(
        one * temperature, torch.tensor([top_k], dtype=torch.int32), one * top_p, one * u
    )
    assert 0 <= int(sample(logits.clone(), plain)) < VOCAB
    asked = edits_of({0: Asked([1], [2, 2], min_p, 2.0, -2.0, penalty, {3: -torch.inf, 4: 100.0})})
    how = SamplingRows(plain.temperature, plain.top_k, plain.top_p, plain.u, edits=asked)
    drawn = int(sample(logits.clone(), how))
    assert 0 <= drawn < VOCAB and drawn != 3
