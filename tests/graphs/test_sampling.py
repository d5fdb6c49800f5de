"""Sampling: exact truncation, the right distribution, nothing but seed and position in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dualpace.graphs.sampling import SamplingRows, sample, smallest_kept
from dualpace.graphs.uniform import uniforms
from tests.graphs.uniform import uniform


def rows_of(
    count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0
) -> SamplingRows:
    u = torch.tensor([uniform(seed, position) for position in range(count)])
    full = torch.full
    return SamplingRows.of(
        full((count,), temperature),
        full((count,), top_k, dtype=torch.int32),
        full((count,), top_p),
        u,
    )


def kept_by_brute_force(weights: list[float], top_k: int, top_p: float) -> set[int]:
    total, kept = sum(weights), set()
    for token, weight in enumerate(weights):
        heavier = [other for other in weights if other > weight]
        # Sums of multiples of 1/64 are exact, so the borders are too.
        if (top_k == 0 or len(heavier) < top_k) and (top_p == 1 or sum(heavier) < top_p * total):
            kept.add(token)
    return kept


@given(
    weights=st.lists(st.integers(0, 64), min_size=2, max_size=12).filter(any),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_truncation_equals_brute_force(weights: list[int], top_k: int, top_p: float) -> None:
    scaled = [weight / 64 for weight in weights]
    expected = kept_by_brute_force(scaled, top_k, top_p) or {int(np.argmax(scaled))}
    if top_p == 0:  # nothing outweighs the best: it alone is left
        expected = {i for i, w in enumerate(scaled) if w == max(scaled)}
    tensor = torch.tensor([scaled])
    least = smallest_kept(tensor, torch.tensor([top_k]), torch.tensor([top_p]))
    assert {i for i, w in enumerate(scaled) if w >= float(least[0])} == expected


@pytest.mark.parametrize(("top_k", "top_p"), [(2000, 1.0), (0, 0.9), (1500, 0.99), (1024, 1.0)])
def test_truncation_beyond_the_first_candidates(top_k: int, top_p: float) -> None:
    weights = torch.rand(3, 5000, generator=torch.Generator().manual_seed(3)) * 0.2 + 0.8
    weights[1, 17] = 1e5  # one row settles at once, the others do not
    least = smallest_kept(weights, torch.full((3,), top_k), torch.full((3,), top_p))
    for row, limit in zip(weights.double(), least, strict=True):
        ordered = row.sort(descending=True).values
        ahead = ordered.cumsum(0) - ordered
        allowed = (torch.arange(5000) < (top_k or 5000)) & (
            (ahead < np.float32(top_p) * row.sum()) | (top_p == 1)
        )
        count = int(allowed.sum())
        kept = int((row >= float(limit)).sum())
        assert abs(kept - count) <= (0 if top_p == 1 else 1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8)]
)
def test_drawn_tokens_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    count, vocab = 20_000, 24
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5)) * 1.5
    drawn = sample(logits.expand(count, -1), rows_of(count, temperature, top_k, top_p, seed=11))
    probabilities = (logits.double() / temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    ahead = probabilities[order].cumsum(0) - probabilities[order]
    keep = (torch.arange(vocab) < (top_k or vocab)) & ((ahead < top_p) | (top_p == 1))
    allowed = torch.zeros(vocab, dtype=torch.bool)
    allowed[order[keep]] = True
    observed = torch.bincount(drawn, minlength=vocab)
    assert not observed[~allowed].any()
    expected = (probabilities * allowed)[allowed]
    expected = expected / expected.sum() * count
    assert stats.chisquare(observed[allowed], expected).pvalue > 0.001


def test_a_row_is_the_same_in_every_batch() -> None:
    logits = torch.randn(33, 3000, generator=torch.Generator().manual_seed(2)) * 3
    rows = SamplingRows.of(
        torch.linspace(0, 1.5, 33),
        torch.arange(33, dtype=torch.int32) % 7,
        torch.linspace(0.3, 1.0, 33),
        torch.linspace(0, 0.999, 33),
    )
    together = sample(logits, rows)
    for i in range(33):
        alone = SamplingRows.of(
            rows.temperature[i : i + 1],
            rows.top_k[i : i + 1],
            rows.top_p[i : i + 1],
            rows.u[i : i + 1],
        )
        assert sample(logits[i : i + 1], alone) == together[i]


def test_greedy_rows_take_the_best_token_with_or_without_company() -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(4))
    best = logits.argmax(-1).int()
    assert torch.equal(sample(logits, SamplingRows.greedy(8)), best)
    temperature = torch.tensor([0.0, 1.0] * 4)
    mixed = SamplingRows.of(
        temperature, torch.zeros(8, dtype=torch.int32), torch.ones(8), torch.full((8,), 0.999)
    )
    assert not mixed.all_greedy
    assert torch.equal(sample(logits, mixed)[::2], best[::2])
    assert SamplingRows.of(temperature * 0, mixed.top_k, mixed.top_p, mixed.u).all_greedy


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24])
def test_the_ends_of_the_uniform_range_draw_tokens_that_are_possible(u: float) -> None:
    logits = torch.full((1, 50_000), -torch.inf)
    logits[0, 7], logits[0, 40_000] = 1.0, 1.5
    one = torch.ones(1)
    rows = SamplingRows.of(one, torch.zeros(1, dtype=torch.int32), one, torch.tensor([u]))
    assert int(sample(logits, rows)[0]) == (7 if u == 0 else 40_000)


@given(seed=st.integers(-(2**70), 2**70), position=st.integers(0, 2**40))
@settings(max_examples=200, deadline=None)
def test_scalar_and_array_uniforms_agree(seed: int, position: int) -> None:
    array = uniforms(np.array([seed & (2**64 - 1)], np.uint64), np.array([position], np.uint64))
    assert float(array[0]) == uniform(seed, position)
    assert 0 <= uniform(seed, position) < 1


def test_uniforms_are_uniform_and_unrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(500, dtype=np.uint64))
    values = uniforms(seeds, positions)  # [position, seed]
    assert stats.kstest(values.ravel(), "uniform").pvalue > 0.001
    along_positions = np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]
    along_seeds = np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]
    assert abs(along_positions) < 0.01 and abs(along_seeds) < 0.01
    assert len(np.unique(values)) > 0.99 * values.size
