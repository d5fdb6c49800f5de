"""The device's sampler keeps and draws what the reference does."""

import dataclasses

import pytest
import torch

from dualpace.graphs import sampling as reference
from dualpace.graphs.gpu import sampling
from dualpace.graphs.logit_edits import LogitEdits, edit
from dualpace.graphs.sampling import SamplingRows


def rows_of(rows: list[tuple[float, int, float, float]], device: torch.device) -> SamplingRows:
    temperature, top_k, top_p, u = (torch.tensor(column) for column in zip(*rows, strict=True))
    made = SamplingRows.of(temperature.float(), top_k.int(), top_p.float(), u.float())
    moved = (made.temperature, made.top_k, made.top_p, made.u)
    return SamplingRows(*(t.to(device) for t in moved), made.all_greedy, made.no_filter)


@pytest.mark.parametrize("vocab", [40, 5000])
def test_same_tokens_as_the_reference(vocab: int, device: torch.device) -> None:
    kinds = [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (0.7, 5, 1.0),
        (1.3, 0, 0.8),
        (1.0, 7, 0.5),
        (2.0, 1, 1.0),
    ]
    rows = [(*kind, u) for kind in kinds for u in (0.0, 0.37, 0.93)]
    logits = 3 * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab))
    made = rows_of(rows, device)
    tokens = torch.full((len(rows),), -1, dtype=torch.int32, device=device)
    sampling.sample(logits.to(device), made, tokens)
    assert tokens.tolist() == reference.sample(logits.to(device), made).tolist()


def test_edited_logits_are_sampled_like_the_references(device: torch.device) -> None:
    """Forbidden tokens and those that min-p takes have no weight here either."""
    rows = [(1.0, 0, 1.0, u) for u in (0.0, 0.5, 0.999)] + [(0.7, 3, 0.9, 0.8), (0.0, 0, 1.0, 0.5)]
    logits = 3 * torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(1))
    made = rows_of(rows, device)
    best = logits.argmax(-1)
    count = len(rows)
    every = torch.arange(count, device=device)
    full, none = torch.full((count,), 0.2, device=device), torch.zeros(count, device=device)
    edits = LogitEdits(
        rows=every,
        min_p=full,
        presence=none,
        frequency=none,
        repetition=none + 1,
        bias_owner=every,
        bias_token=best.to(device),
        bias=none - torch.inf,
        only=every[:0],
        seen_owner=every[:0],
        seen_token=every[:0],
        seen_count=none[:0],
        any_min_p=True,
        masked=every[:1],
        masks=torch.full((1, 10), 0x0F0F0F0F, dtype=torch.int32, device=device),
    )
    wanted = reference.sample(logits.to(device), dataclasses.replace(made, edits=edits))
    edited = logits.to(device)
    edit(edited, edits, made.temperature)
    tokens = torch.full((count,), -1, dtype=torch.int32, device=device)
    sampling.sample(edited, made, tokens)
    assert tokens.tolist() == wanted.tolist()
    assert not (tokens.cpu() == best).any()


def test_equal_weights_are_kept_together(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, -1.0]] * 4, device=device)
    made = rows_of([(1.0, 2, 1.0, u) for u in (0.0, 0.4, 0.7, 0.999)], device)
    tokens = torch.empty(4, dtype=torch.int32, device=device)
    sampling.sample(logits, made, tokens)
    assert tokens.tolist() == [1, 2, 3, 3]


def test_best_of_tiles_takes_the_lowest_of_equals(device: torch.device) -> None:
    value = torch.tensor([[1.0, 5.0], [3.0, 5.0], [3.0, 4.0]], device=device)
    index = torch.tensor([[7, 2], [9, 12], [30, 31]], dtype=torch.int32, device=device)
    tokens = torch.empty(2, dtype=torch.int32, device=device)
    sampling.best_tile(value, index, tokens)
    assert tokens.tolist() == [9, 2]


def test_argmax_takes_the_lowest_of_equals(device: torch.device) -> None:
    logits = torch.zeros(2, 5000, device=device)
    logits[0, 4500] = logits[0, 300] = 1.0
    tokens = torch.empty(2, dtype=torch.int32, device=device)
    sampling.argmax(logits, tokens)
    assert tokens.tolist() == [300, 0]


def test_best_of_ranks_takes_the_lowest_of_equals_and_no_padding(device: torch.device) -> None:
    vocab, part = 130, 70  # the second part ends with ten rows of padding
    logits = torch.full((4, 2 * part), -3.0, device=device)
    logits[0, 100] = logits[0, 30] = 1.0
    logits[1, 129:] = 2.0
    logits[2] = -5.0
    logits[3, 75] = 0.5
    both = torch.empty(2, 4, 2, dtype=torch.int32, device=device)
    for rank in range(2):
        here = logits[:, rank * part :][:, :part].contiguous()
        sampling.best_part(here, rank * part, both[rank])
    tokens = torch.empty(4, dtype=torch.int32, device=device)
    sampling.best_rank(both.transpose(0, 1).contiguous(), tokens, vocab)
    assert tokens.tolist() == [30, 129, 0, 75]
    logits[1, 129] = 1.5  # as another tile's rounding could have it
    sampling.best_part(logits[:, part:].contiguous(), part, both[1])
    sampling.best_rank(both.transpose(0, 1).contiguous(), tokens, vocab)
    assert tokens.tolist() == [30, 129, 0, 75]
