"""Log-probabilities on their way: what a sampler has packed is what a request is told, of each of
its tokens once."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpace.graphs.logprobs import log_probabilities
from dualpace.runtime.alignment import Alignment
from dualpace.runtime.logprobs import TokenLogprobs, by_place, num_words, of_rows
from dualpace.runtime.messages import StepDone, Tokens, asks_for
from dualpace.runtime.sampling_params import MAX_LOGPROBS
from dualpace.runtime.wire import decode
from dualpace.runtime.wiring import channel_size
from dualpace.runtime.worker.drawn import NOTHING, HostDrawn, joined
from dualpace.runtime.worker.rows import asking_of

VOCAB = 50


def step(asking: list[int], tokens: list[int], best: int) -> tuple[StepDone, torch.Tensor]:
    """A step's message through the wire, and the log-softmax of its rows."""
    logits = 3 * torch.randn(len(tokens), VOCAB, generator=torch.Generator().manual_seed(1))
    drawn = torch.tensor(tokens, dtype=torch.int32)
    rows = torch.tensor(asking, dtype=torch.int64)
    packed = log_probabilities(logits, rows, drawn[rows], best)
    assert packed.shape[1] == num_words(best)
    told = np.array(asking, np.int32), packed.numpy().ravel()
    message = decode(StepDone(1, 0.0, 0.0, np.array(tokens, np.int32), 0, *told).encode())
    assert isinstance(message, StepDone)
    return message, logits.log_softmax(-1)


def tokens_of(done: StepDone, kept: list[int]) -> Tokens:
    """What the engine tells its owner of these rows, through the wire."""
    ids, none = np.array(kept, np.int64), np.zeros(len(kept), np.uint8)
    told = of_rows(done, kept)
    message = decode(Tokens(ids, done.tokens[kept], none, none, 0.0, 0, *told).encode())
    assert isinstance(message, Tokens)
    return message


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(0, 20))
def test_each_kept_row_that_asks_is_told_once(data: st.DataObject, count: int, best: int) -> None:
    rows = st.lists(st.integers(0, count - 1), unique=True, min_size=1).map(sorted)
    asking, kept = data.draw(rows), data.draw(rows)  # others have been cancelled
    drawn = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
    done, wanted = step(asking, drawn, best)
    found = by_place(tokens_of(done, kept))
    assert [kept[place] for place in found] == [row for row in kept if row in asking]
    for place, told in found.items():
        row = wanted[kept[place]]
        assert told.token_id == drawn[kept[place]]
        assert abs(told.logprob - float(row[told.token_id])) < 1e-5
        assert told.rank == 1 + int((row > row[told.token_id]).sum())
        assert [token for token, _ in told.best] == row.topk(best).indices.tolist()
        assert all(abs(value - float(row[token])) < 1e-5 for token, value in told.best)


def test_where_nobody_asks_nothing_is_sent() -> None:
    done = StepDone(1, 0.0, 0.0, np.array([4, 5], np.int32), 0)
    message = tokens_of(done, [0, 1])
    assert not len(message.asking) and not len(message.logprobs) and by_place(message) == {}
    assert asking_of(np.empty(0, np.uint8), np.arange(2)) is None
    assert asking_of(np.array([0, 3, 0], np.uint8), np.array([0, 2])) is None


def test_rows_of_a_batch_are_told_as_much_as_the_one_that_asks_most() -> None:
    asked = np.array([asks_for(each) for each in (None, 0, 4, None, 1)], np.uint8)
    found = asking_of(asked, np.array([4, 3, 1]))
    assert found is not None and (found.rows.tolist(), found.best) == ([0, 2], 4)


def test_parts_of_a_batch_are_joined_by_their_places() -> None:
    def part(tokens: list[int], asking: list[int]) -> HostDrawn:
        words = [10 * tokens[row] for row in asking]
        return HostDrawn(*(np.array(each, np.int32) for each in (tokens, asking, words)))

    own = part([7, 8], [1]).among(4, np.array([3, 0]))
    assert own.tokens.tolist() == [8, -1, -1, 7] and own.asking.tolist() == [0]
    whole = joined([own, part([1], []), NOTHING, part([2, 3], [0, 1])])
    assert whole.tokens.tolist() == [8, -1, -1, 7, 1, 2, 3]
    assert whole.asking.tolist() == [0, 5, 6] and whole.logprobs.tolist() == [80, 20, 30]


class Letters:
    special_ids = frozenset([26])

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == 26 else bytes([97 + token_id])


def told(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, [(token_id, -1.0), (3, -2.0), (26, -3.0)])


def test_a_request_is_told_no_more_than_it_asked_for() -> None:
    for count in (0, 1, 3):
        alignment = Alignment(Letters(), count, skip_special_tokens=True)
        alignment.add(told(0), 1, is_hidden=False)
        (only,) = alignment.take(1)
        assert [one.token_id for one in only.best] == [0, 3, 26][:count]
    assert [one.data for one in only.best] == [b"a", b"d", None]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 26), max_size=12), st.data())
def test_a_token_is_told_once_its_text_is_shown_and_not_at_all_if_that_is_cut_off(
    tokens: list[int], data: st.DataObject
) -> None:
    """Letters are shown after some delay, and in the end some are never shown."""
    alignment = Alignment(Letters(), 0, skip_special_tokens=True)
    letters = sum(token != 26 for token in tokens)
    end = data.draw(st.integers(0, letters))
    added = shown = 0
    got: list[int] = []
    for token in tokens:
        alignment.add(told(token), int(token != 26), is_hidden=False)
        added += token != 26
        more = data.draw(st.integers(0, max(0, min(added, end) - shown)))
        shown += more
        got += [each.drawn.token_id for each in alignment.take(more)]
        assert sum(token != 26 for token in got) == shown
    got += [each.drawn.token_id for each in alignment.take(end - shown)]
    starts = np.cumsum([0, *(token != 26 for token in tokens)])
    wanted = [
        t for t, at in zip(tokens, starts, strict=False) if at < end or (t == 26 and at == end)
    ]
    assert got == wanted
    assert got + [each.drawn.token_id for each in alignment.take(0, is_all=True)] == tokens


def test_a_step_of_which_every_row_asks_for_all_has_room() -> None:
    plan: Any = SimpleNamespace(
        model=SimpleNamespace(eos_token_ids=(2,), vocab=300),
        kv=SimpleNamespace(gpu_pool_blocks=9, host_pool_blocks=9, gpu_blocks=8, host_blocks=8),
        gpu=SimpleNamespace(max_batch_size=512, max_batched_tokens=8192),
        cpu=SimpleNamespace(max_batch_size=512),
        policy=SimpleNamespace(lockstep=True),
    )
    tokens = np.zeros(1024, np.int32)
    words = np.zeros(1024 * num_words(MAX_LOGPROBS), np.int32)
    done = StepDone(1, 0.0, 0.0, tokens, 0, tokens, words)
    assert done.nbytes() <= channel_size(plan, "gpu").slot_bytes_up
