"""Blocks, lengths and limits at their edges: the arithmetic under Equations 2-4."""

import pytest

from dualpace.block import blocks_for
from dualpace.errors import ConfigError
from dualpace.runtime.schedule import Limits, RequestTooLong
from dualpace.runtime.schedule.envelope import finish_growth, gpu_peak
from dualpace.runtime.schedule.limits import context_limit
from dualpace.runtime.schedule.view import finish_peak, next_growth
from dualpace.runtime.types import Phase, Request
from tests.runtime.schedule.drive import add, gpu, make


def decoding(kv_len: int, blocks: int) -> Request:
    """A request of 40 prompt tokens whose KV holds `kv_len` tokens."""
    return Request(
        0,
        prompt_len=40,
        max_tokens=100,
        phase=Phase.DECODING,
        num_output=kv_len - 39,
        kv_len=kv_len,
        blocks=list(range(blocks)),
    )


def test_a_token_needs_a_block_when_the_last_one_is_full() -> None:
    requests = [decoding(kv_len, 3) for kv_len in (47, 48, 49, 64)]
    assert [r.next_growth for r in requests] == [0, 1, 1, 1]
    assert next_growth(requests) == 3 and next_growth(requests[:1]) == 0


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_a_block_holds_sixteen_tokens(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


@pytest.mark.parametrize(
    ("kv_len", "blocks", "growth"), [(47, 3, 0), (48, 3, 1), (48, 4, 0), (63, 4, 0), (64, 4, 1)]
)
def test_a_decode_needs_a_block_when_its_last_one_is_full(
    kv_len: int, blocks: int, growth: int
) -> None:
    assert decoding(kv_len, blocks).next_growth == growth


@pytest.mark.parametrize(
    ("in_flight", "pins", "ready"), [(0, 0, True), (1, 0, False), (0, 1, False)]
)
def test_a_request_is_ready_when_no_round_and_no_copy_touches_its_kv(
    in_flight: int, pins: int, ready: bool
) -> None:
    request = decoding(48, 3)
    request.in_flight, request.pins = in_flight, pins
    assert request.ready is ready


def test_growth_is_what_lies_between_held_and_peak() -> None:
    first, second = decoding(48, 3), decoding(40, 3)
    first.peak_blocks, second.peak_blocks = 9, 4
    assert (first.finish_growth, second.finish_growth) == (6, 1)
    assert finish_growth([first, second]) == 7 and gpu_peak([first, second]) == 13


def test_a_recompute_prefills_the_prompt_and_all_outputs() -> None:
    assert decoding(49, 4).prefill_len == 50


def test_the_finish_peak_has_room_for_the_next_token_of_a_decode_alone() -> None:
    assert finish_peak(decoding(48, 3), 1) == 4, "its next token opens a fourth block"
    assert finish_peak(decoding(47, 3), 1) == 3
    flying = decoding(48, 3)
    flying.num_output, flying.in_flight = 8, 1  # the round in flight fills the third block
    assert finish_peak(flying, 1) == 4
    waiting = Request(0, prompt_len=32, max_tokens=9, kv_len=32, blocks=[1, 2])
    assert finish_peak(waiting, 1) == 2, "chunks of a prompt: the last output is never stored"
    assert finish_peak(waiting, 2) == 3
    assert finish_peak(Request(0, prompt_len=0, max_tokens=1), 1) == 0


def test_hbm_beyond_all_finish_peaks_is_unpromised() -> None:
    state = make(gpu=10)
    add(state, 0, 33, 32)  # 64 tokens at the end
    gpu(state)
    assert state.view().hbm_unpromised == 6


# Limits


@pytest.mark.parametrize("key", ["gpu_rows", "cpu_rows", "soft_tokens"])
def test_one_row_or_token_is_enough_and_none_is_not(key: str) -> None:
    assert getattr(Limits(**{key: 1}), key) == 1
    with pytest.raises(ConfigError, match=f"{key}=0 admits nothing"):
        Limits(**{key: 0})


def test_the_hard_limit_is_at_least_the_soft_one_and_the_rows() -> None:
    assert Limits(gpu_rows=8, soft_tokens=64, hard_tokens=64).hard_tokens == 64
    assert Limits(gpu_rows=64, soft_tokens=8, hard_tokens=64).hard_tokens == 64
    for rows, soft in ((8, 65), (65, 8)):
        with pytest.raises(ConfigError, match="hard_tokens=64 is below 65"):
            Limits(gpu_rows=rows, soft_tokens=soft, hard_tokens=64)


def test_what_is_unset_takes_its_neighbours_value() -> None:
    limits = Limits(cpu_rows=7, soft_tokens=8, gpu_rows=8, hard_tokens=100)
    assert (limits.staging, limits.host_admission, limits.host_prompt) == (100, 7, 100)
    limits = Limits(cpu_rows=7, soft_tokens=8, gpu_rows=8, hard_tokens=100, staging_tokens=40)
    assert (limits.staging, limits.host_prompt) == (40, 40)
    limits = Limits(soft_tokens=8, gpu_rows=8, hard_tokens=100, staging_tokens=400, cpu_waiting=0)
    assert (limits.host_prompt, limits.host_admission) == (100, 0)


@pytest.mark.parametrize(
    ("gpu", "host", "limit"), [(4, 2, 64), (2, 4, 64), (2, 6, 96), (2, 60, 96), (9, 60, 144)]
)
def test_the_context_limit_is_the_larger_tier_alone_and_one_forward_on_the_host(
    gpu: int, host: int, limit: int
) -> None:
    limits = Limits(soft_tokens=8, gpu_rows=8, hard_tokens=96)
    assert context_limit(gpu, host, limits.host_prompt) == limit
    limits.admit_length(limit, 1, gpu, host)
    limits.admit_length(1, limit, gpu, host)
    with pytest.raises(RequestTooLong, match=f"KV for {limit + 1} tokens, the limit is {limit}"):
        limits.admit_length(limit, 2, gpu, host)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(0, 5), (5, 0), (-1, -1)])
def test_no_prompt_or_no_answer_is_no_request(prompt_len: int, max_tokens: int) -> None:
    with pytest.raises(RequestTooLong, match="both must be at least 1"):
        Limits().admit_length(prompt_len, max_tokens, 9, 9)


def test_only_where_the_host_has_room_the_forward_is_to_blame() -> None:
    limits = Limits(soft_tokens=8, gpu_rows=8, hard_tokens=96)
    for host, blamed in ((6, False), (7, True)):
        with pytest.raises(RequestTooLong) as refused:
            limits.admit_length(97, 1, 2, host)
        assert ("one forward of at most 96" in str(refused.value)) is blamed
