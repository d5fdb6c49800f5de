"""Where the budgets of Appendix A.1 end: to the row, the token and the block of 16 tokens."""

import pytest

from dualpace.runtime.schedule import GpuRound, View
from dualpace.runtime.schedule.draft import Departures, in_arrival_order
from dualpace.runtime.schedule.gpu_round import gpu_round
from dualpace.runtime.types import Request
from tests.runtime.schedule.drive import ids
from tests.runtime.schedule.views import decoding, in_progress, on_host, prompt, view


def marked(request: Request) -> Request:
    request.marked = True
    return request


def prefills(seen: View) -> tuple[list[int], list[int]]:
    """Prompts of the round for HBM, and for the host."""
    decision = gpu_round(seen)
    return ids(decision.prefill_gpu), ids(decision.prefill_cpu)


# A.1.2


def growing(*ids: int) -> list[Request]:
    """Two blocks each, and the next token needs a third."""
    return [decoding(i, 2, 4, kv_len=32) for i in ids]


def test_next_tokens_that_just_fit_wait_for_no_copy_and_one_block_too_few_does() -> None:
    queue = growing(0, 1)
    assert ids(gpu_round(view(gpu_running=queue, free=2, gpu_vacating=1)).decode) == [0, 1]
    assert gpu_round(view(gpu_running=queue, free=1, gpu_vacating=1)) == GpuRound()


def test_evictions_that_free_just_enough_let_all_others_decode() -> None:
    decision = gpu_round(view(gpu_running=growing(0, 1, 2, 3), free=1))
    assert ids(decision.swap_out) == [3], "4 needed, 1 free: 2 blocks and its own next one"
    assert ids(decision.decode) == [0, 1, 2]


def test_evictions_that_free_one_block_too_few_are_all_that_happens() -> None:
    queue = [*growing(0, 1, 2, 3), decoding(4, 1, 3, kv_len=16)]
    decision = gpu_round(view(gpu_running=queue, free=2, host=3, host_free=1))
    assert ids(decision.swap_out) == [4], "5 needed, 2 free, 2 by it, and no room for another"
    assert decision.decode == []


def test_one_block_too_few_and_no_host_leaves_the_subset_that_fits() -> None:
    assert ids(gpu_round(view(gpu_running=growing(0, 1), free=1, host=0)).decode) == [0]


def test_a_victim_may_take_the_last_of_the_host_and_need_all_of_it() -> None:
    """Without it HBM holds the finish peaks of the others, so they reserve nothing."""
    queue = [decoding(0, 2, 4, kv_len=32), decoding(1, 2, 3, kv_len=32)]
    resident = on_host(2, 1, 1)
    resident.pins = 1
    decision = gpu_round(view(gpu_running=queue, cpu_waiting=[resident], hbm=4, host=3))
    assert ids(decision.swap_out) == [1] and ids(decision.decode) == [0]


def test_who_is_on_the_way_in_is_neither_evicted_nor_recomputed() -> None:
    """A swap-in's copy is not reported yet."""
    queue = growing(0, 1)
    queue[1].pins = 1
    assert ids(gpu_round(view(gpu_running=queue, free=0)).swap_out) == [0]
    assert ids(gpu_round(view(gpu_running=queue, free=0, host=0)).preempt) == [0]
    queue[0].pins = 1
    assert gpu_round(view(gpu_running=queue, free=0, host=0)) == GpuRound()


def test_the_room_of_a_recomputed_request_serves_swap_ins_of_the_same_round() -> None:
    queue = [decoding(0, 3, 4, kv_len=48), decoding(1, 3, 5, kv_len=48)]
    seen = view(gpu_running=queue, cpu_waiting=[on_host(2, 1, 2)], hbm=8, free=0, host=3)
    decision = gpu_round(seen)
    assert ids(decision.preempt) == [1] and ids(decision.decode) == [0]
    assert ids(decision.swap_in) == [2], "peaks of 4 and 2 fit in 8"


# A.1.4 and A.1.6: swap-ins and marks


def swap_ins(kv_len: int = 31, peak: int = 3, **more: int) -> list[int]:
    """Of three that wait on the host."""
    residents = [on_host(i, -(-kv_len // 16), peak, kv_len) for i in range(3)]
    return ids(gpu_round(view(cpu_waiting=residents, **more)).swap_in)


def test_swap_ins_end_with_rows_tokens_blocks_or_finish_peaks() -> None:
    assert swap_ins() == [0, 1, 2]
    assert swap_ins(gpu_rows=2) == [0, 1]
    assert swap_ins(soft=2) == [0, 1]
    assert swap_ins(free=4) == [0, 1], "2 blocks each, the next token included"
    assert swap_ins(free=5) == [0, 1]
    assert swap_ins(kv_len=32, free=5) == [0], "the next token takes a third block"
    assert swap_ins(kv_len=32, free=2) == []
    assert swap_ins(hbm=6) == [0, 1]
    assert swap_ins(peak=6, hbm=10) == [0]


def test_a_mark_holds_a_row_and_a_token_until_it_is_honoured() -> None:
    prompts = [prompt(i, 16) for i in range(3)]
    running = [marked(on_host(9, 2, 4))]
    assert prefills(view(waiting=prompts, cpu_running=running, gpu_rows=3)) == ([0, 1], [])
    assert prefills(view(waiting=prompts, cpu_running=running, soft=17)) == ([0], [])
    waiting = [marked(on_host(0, 2, 3)), on_host(1, 2, 3), on_host(2, 2, 3)]
    honoured = gpu_round(view(cpu_waiting=waiting, gpu_rows=2))
    assert ids(honoured.swap_in) == [0, 1] and honoured.withdraw == []


@pytest.mark.parametrize(
    ("peak", "hbm", "free", "taken"),
    [(3, 100, 7, [1]), (3, 100, 6, []), (7, 11, 11, [1]), (7, 10, 10, [])],
)
def test_a_mark_holds_its_finish_peak_against_swap_ins(
    peak: int, hbm: int, free: int, taken: list[int]
) -> None:
    """It is 4; the other one takes 3 blocks at once."""
    running, waiting = [marked(on_host(0, 2, 4))], [on_host(1, 2, peak, kv_len=32)]
    seen = view(cpu_running=running, cpu_waiting=waiting, hbm=hbm, free=free)
    assert ids(gpu_round(seen).swap_in) == taken


def test_who_is_marked_already_or_ends_with_the_round_in_flight_is_not_marked() -> None:
    standing, ending, other = marked(on_host(0, 2, 4)), on_host(1, 2, 4), on_host(2, 2, 4)
    ending.max_tokens, ending.in_flight = 2, 1
    decision = gpu_round(view(cpu_running=[standing, ending, other]))
    assert ids(decision.mark) == [2] and decision.withdraw == []


def test_a_recomputed_request_takes_its_old_place_in_arrival_order() -> None:
    queue = [prompt(i, 16) for i in (1, 3, 5)]
    for order, place in ((0, 0), (2, 1), (4, 2), (6, 3)):
        assert ids(in_arrival_order(queue, prompt(order, 16))).index(order) == place


# A.1.5, to HBM


def test_the_hard_limit_may_be_reached_and_marks_count_against_it() -> None:
    one = [decoding(9, 2, 4)]
    assert prefills(view(waiting=[prompt(0, 64)], gpu_running=one, soft=9, hard=65)) == ([0], [])
    assert prefills(view(waiting=[prompt(0, 64)], gpu_running=one, soft=9, hard=64)) == ([], [])
    running = [marked(on_host(9, 2, 4))]
    assert prefills(view(waiting=[prompt(0, 64)], cpu_running=running, soft=9, hard=64)) == ([], [])


def test_a_prompt_is_cut_where_the_soft_limit_less_rows_and_marks_ends() -> None:
    seen = view(
        waiting=[prompt(0, 100)],
        gpu_running=[decoding(1, 2, 4)],
        cpu_running=[marked(on_host(2, 2, 4))],
        soft=32,
    )
    assert [p.num_tokens for p in gpu_round(seen, Departures(chunk_prompts=True)).prefill_gpu] == [
        30
    ]


def test_a_prompt_as_long_as_the_hard_limit_is_whole_and_may_be_evicted_later() -> None:
    long = prompt(0, 64, 100)  # peak 11
    assert prefills(view(waiting=[long], soft=9, hard=64, hbm=8, host=11)) == ([0], [])
    assert prefills(view(waiting=[long], soft=9, hard=64, hbm=8, host=10)) == ([], [])


@pytest.mark.parametrize(
    ("host", "hard", "tokens"), [(5, 64, [32]), (4, 64, []), (4, 17, [16]), (5, 33, [32])]
)
def test_a_last_chunk_waits_for_equation_2_and_the_others_do_not(
    host: int, hard: int, tokens: list[int]
) -> None:
    """32 of its tokens are left. It joins those that may be evicted: then 5 are reserved."""
    partial = in_progress(1, 64, done=32, peak=5)
    seen = view(
        waiting=[partial], gpu_running=[decoding(0, 2, 6)], hbm=8, host=host, soft=9, hard=hard
    )
    assert [p.num_tokens for p in gpu_round(seen).prefill_gpu] == tokens


@pytest.mark.parametrize(
    ("hbm", "host", "admitted"), [(6, 24, [1, 2]), (6, 23, [1]), (8, 16, [1, 2]), (8, 15, [1])]
)
def test_the_reserve_counts_the_prompts_of_this_round_and_ends_where_the_rest_fits(
    hbm: int, host: int, admitted: list[int]
) -> None:
    """Three finish peaks of 8."""
    prompts = [prompt(i, 16, 113) for i in (1, 2)]
    seen = view(waiting=prompts, gpu_running=[decoding(0, 1, 8)], hbm=hbm, host=host)
    assert prefills(seen) == (admitted, [])


# A.1.5, to the host


def test_a_host_prompt_may_take_all_of_staging_and_all_of_the_host() -> None:
    prompts = [prompt(i, 47, 2) for i in range(2)]  # 3 blocks, now and for good
    assert prefills(view(waiting=prompts, hbm=0, staging=47)) == ([], [0])
    assert prefills(view(waiting=prompts, hbm=0, staging=94)) == ([], [0, 1])
    assert prefills(view(waiting=prompts, hbm=0, staging=93)) == ([], [0])
    assert prefills(view(waiting=prompts, hbm=0, host=3)) == ([], [0])
    assert prefills(view(waiting=prompts, hbm=0, host=2)) == ([], [])
    assert prefills(view(waiting=prompts, hbm=0, host=5)) == ([], [0])
    assert prefills(view(waiting=prompts, hbm=0, host=6)) == ([], [0, 1])


def test_host_prompts_leave_the_reserve_alone_and_add_up_against_it() -> None:
    evictable = [decoding(9, 2, 6), decoding(10, 2, 6)]  # 6 reserved
    prompts = [prompt(i, 128) for i in range(2)]  # 8 blocks each
    for host, taken in ((22, [0, 1]), (21, [0]), (14, [0]), (13, [])):
        assert prefills(view(waiting=prompts, gpu_running=evictable, hbm=6, host=host)) == (
            [],
            taken,
        )


def test_the_first_on_the_host_must_be_able_to_end_there_and_others_need_not_yet() -> None:
    long = prompt(0, 48, 17)  # 3 blocks, 4 in the end
    assert prefills(view(waiting=[long], hbm=0, host=4)) == ([], [0])
    assert prefills(view(waiting=[long], hbm=0, host=4, host_free=3)) == ([], [0])
    running = [on_host(1, 2, 2)]
    assert prefills(view(waiting=[long], cpu_running=running, hbm=0, host=5)) == ([], [0])
    crowded = [prompt(2, 16), long]
    assert prefills(view(waiting=crowded, hbm=0, host=4)) == ([], [2, 0])
