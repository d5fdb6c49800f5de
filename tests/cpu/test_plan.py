"""Decode plans: every KV block exactly once, threads balanced, cut requests merged completely."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpace.cpu.plan import BEGIN, END, HEAD, ITEM, ROW, SLOT, plan_decode

batches = st.lists(st.integers(1, 3000), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(batches, st.sampled_from([1, 2, 3, 8]), st.integers(1, 17), st.integers(1, 3))
def test_every_block_once_and_balanced(
    lens: list[int], kv_heads: int, threads: int, chunks_per_thread: int
) -> None:
    plan = plan_decode(lens, kv_heads, threads, chunks_per_thread)
    blocks = [-(-n // 16) for n in lens]
    seen = {(r, h): np.zeros(blocks[r], int) for r in range(len(lens)) for h in range(kv_heads)}
    for segment in plan.segments:
        for h in range(plan.heads_per_item):
            seen[segment[ROW], segment[HEAD] + h][segment[BEGIN] : segment[END]] += 1
    assert all((counts == 1).all() for counts in seen.values())

    chunks = plan.chunk_blocks()
    assert len(chunks) == plan.num_chunks >= 1
    assert plan.num_threads == (threads if plan.num_chunks > 1 else 1)
    total = sum(blocks) * kv_heads // plan.heads_per_item
    assert chunks.sum() == total
    # Whoever is free takes the next: all end within a chunk, and of few blocks a short one: 8 to 12
    # blocks, or all where there are fewer than two of 8. A chunk is even to within rounding, plus
    # the small move to a near request border at each end.
    ends = [0] * threads
    for chunk in chunks:
        ends[ends.index(min(ends))] += int(chunk)
    share = total / (threads * chunks_per_thread)
    short = min(total, 15) if total < 16 else 12
    longest = share + 2 + 2 * (share // 32) if share >= 16 else max(short, share)
    assert max(ends) <= total / threads + longest


@settings(max_examples=100, deadline=None)
@given(batches, st.integers(1, 17))
def test_slots_of_a_cut_request_are_its_own(lens: list[int], threads: int) -> None:
    plan = plan_decode(lens, 2, threads)
    slots = [slot for slot in plan.segments[:, SLOT] if slot >= 0]
    assert slots == list(range(plan.num_slots))
    for item, (first, number) in enumerate(plan.item_slots):
        of_item = plan.segments[plan.segments[:, ITEM] == item]
        if number:
            assert of_item[:, SLOT].tolist() == list(range(first, first + number))
            assert number == len(of_item) > 1
        else:
            assert of_item[:, SLOT].tolist() == [-1]


def test_equal_requests_are_not_cut() -> None:
    assert plan_decode([1024] * 32, 8, 16).num_slots == 0


def test_of_short_requests_only_the_last_are_cut() -> None:
    plan = plan_decode([256] * 8, 8, 16)
    assert plan.chunk_blocks().tolist() == [16] * 48 + [8] * 32
    assert set(plan.segments[plan.segments[:, SLOT] >= 0][:, ROW]) == {6, 7}


def test_one_thread_merges_nothing() -> None:
    plan = plan_decode([300, 2000, 5], 2, 1)
    assert (plan.num_chunks, plan.num_slots) == (1, 0)


def test_heads_walked_together() -> None:
    plan = plan_decode([100, 200], 8, 2, heads_per_item=4)
    assert set(plan.segments[:, HEAD]) == {0, 4}


@pytest.mark.parametrize("lens", [[], [3, 0], [[1]]])
def test_refuses_rows_without_tokens(lens: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        plan_decode(lens, 2, 2)


def test_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="divide"):
        plan_decode([5], 3, 1, heads_per_item=2)
