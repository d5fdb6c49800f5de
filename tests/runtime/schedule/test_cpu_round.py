"""Appendix A.2, one paragraph after the other."""

from dataclasses import replace

from dualpace.runtime.schedule import Limits, View
from dualpace.runtime.schedule.cpu_round import cpu_round
from dualpace.runtime.types import Request
from tests.runtime.schedule import views
from tests.runtime.schedule.drive import cpu, fill_host, gpu, ids, make
from tests.runtime.schedule.views import on_host


def view(
    running: list[Request],
    waiting: list[Request],
    *,
    capacity: int = 100,
    migration: int = 0,
    rows: int = 8,
    hard: int = 1024,
) -> View:
    """As the CPU engine sees it; HBM promises nothing."""
    seen = views.view(cpu_running=running, cpu_waiting=waiting, hbm=0, host=capacity)
    limits = Limits(gpu_rows=1, cpu_rows=rows, soft_tokens=1, hard_tokens=hard)
    return replace(seen, limits=limits, envelope=replace(seen.envelope, migration=migration))


# A.2.2 Preserve the running frontier


def test_a22_running_requests_stay_in_order() -> None:
    running = [on_host(3, 2, 4), on_host(1, 2, 4)]
    assert cpu_round(view(running, [])).decode == running


def test_a22_a_marked_request_yields_and_nobody_older_is_admitted() -> None:
    running = [on_host(0, 2, 4), on_host(1, 2, 4), on_host(2, 2, 4)]
    running[1].marked = True
    decision = cpu_round(view(running, [on_host(3, 2, 4)]))
    assert ids(decision.decode) == [0, 2] and ids(decision.displaced) == [1]
    assert decision.admitted == 0


def test_a22_the_suffix_behind_a_boundary_leaves_together() -> None:
    running = [on_host(0, 4, 8), on_host(1, 4, 12), on_host(2, 4, 4)]
    decision = cpu_round(view(running, [on_host(3, 1, 1)], capacity=24, migration=2))
    assert ids(decision.decode) == [0], "13 + 2 used and reserved, 4 to grow: 8 more do not fit"
    assert ids(decision.displaced) == [1, 2], "2 needs nothing, but is behind the boundary"
    assert decision.admitted == 0


def test_a22_next_tokens_come_from_free_blocks_before_anybody_is_admitted() -> None:
    running, waiting = [on_host(0, 2, 3, kv_len=32)], [on_host(1, 2, 3, kv_len=32)]
    usual = view(running, waiting)
    assert ids(cpu_round(replace(usual, host_free=2)).decode) == [0, 1]
    assert ids(cpu_round(replace(usual, host_free=1)).decode) == [0]
    settled = view([on_host(0, 2, 3)], waiting)  # needs no block now
    assert ids(cpu_round(replace(settled, host_free=1)).decode) == [0, 1]
    none = cpu_round(replace(usual, host_free=0))
    assert none.decode == [] and ids(none.displaced) == [0]


def test_a22_the_finish_growth_of_those_that_run_is_not_given_away() -> None:
    running, waiting = [on_host(0, 2, 6)], [on_host(1, 2, 5)]
    assert ids(cpu_round(view(running, waiting, capacity=10)).decode) == [0], "4 to grow, 2 left"
    assert ids(cpu_round(view(running, waiting, capacity=11)).decode) == [0, 1]


def test_a22_displaced_requests_go_to_the_front_of_waiting_in_their_order() -> None:
    state = make(gpu=1, host=64)
    fill_host(state, [0, 1, 2], 32)
    cpu(state)
    fill_host(state, [3], 32)
    state.limits = replace(state.limits, cpu_rows=1)
    assert ids(cpu(state).rows) == [0]
    assert ids(state.cpu_waiting) == [1, 2, 3]


# A.2.3 Admit the ready waiting prefix


def test_a23_waiting_is_admitted_in_order_while_finish_growth_and_reserve_allow() -> None:
    waiting = [on_host(0, 4, 8), on_host(1, 4, 8), on_host(2, 4, 8)]
    decision = cpu_round(view([], waiting, capacity=30, migration=10))
    assert ids(decision.decode) == [0, 1] and decision.admitted == 2
    assert ids(cpu_round(view([], waiting, capacity=30, migration=11)).decode) == [0]


def test_a23_the_prefix_ends_at_the_first_unready_request() -> None:
    waiting = [on_host(0, 4, 8), on_host(1, 4, 8), on_host(2, 4, 8)]
    waiting[1].pins = 1
    assert ids(cpu_round(view([], waiting)).decode) == [0]


def test_a23_immediate_blocks_must_be_free() -> None:
    waiting = [on_host(0, 2, 3, kv_len=32), on_host(1, 2, 3, kv_len=32)]
    crowded = replace(view([], waiting), host_free=1)
    assert ids(cpu_round(crowded).decode) == [0]


def test_a23_rows_and_tokens_bound_the_batch() -> None:
    waiting = [on_host(i, 2, 2) for i in range(4)]
    assert len(cpu_round(view([], waiting, rows=3)).decode) == 3
    assert len(cpu_round(view([], waiting, hard=2)).decode) == 2


# A.2.4 Wait on readiness rather than bypassing ownership


def test_a24_an_unready_head_is_not_passed() -> None:
    waiting = [on_host(0, 4, 8), on_host(1, 4, 8)]
    waiting[0].pins = 1
    decision = cpu_round(view([], waiting))
    assert decision.decode == [] and decision.preempt == []


def test_a24_a_yielded_request_is_not_taken_back_while_its_mark_stands() -> None:
    waiting = [on_host(0, 4, 8), on_host(1, 4, 8)]
    waiting[0].marked = True
    assert cpu_round(view([], waiting)).decode == []


def test_a24_a_round_short_of_the_reserve_alone_waits() -> None:
    waiting = [on_host(0, 4, 8), on_host(1, 4, 8)]
    decision = cpu_round(view([], waiting, capacity=12, migration=4))
    assert decision.decode == [] and decision.preempt == []


def test_a24_a_head_that_can_wait_for_nobody_gets_the_room_of_the_youngest() -> None:
    waiting = [on_host(0, 4, 8), on_host(1, 2, 8), on_host(2, 3, 8)]
    stuck = view([], waiting, capacity=10)  # 9 used, 4 to grow
    decision = cpu_round(stuck)
    assert ids(decision.preempt) == [2] and decision.decode == []
    assert cpu_round(replace(stuck, transfers_in_flight=1)).preempt == [], "copies may free some"
    assert cpu_round(replace(stuck, gpu_capacity=8)).preempt == [], "HBM can take the head"


def test_a24_no_more_are_dropped_than_the_head_needs() -> None:
    head = on_host(0, 2, 3, kv_len=32)
    waiting = [head, on_host(1, 2, 8), on_host(2, 1, 8)]
    assert ids(cpu_round(view([], waiting, capacity=5)).preempt) == [2], "one block is enough"
    roomy = view([], [head, on_host(1, 2, 2)])
    assert ids(cpu_round(replace(roomy, host_free=0)).preempt) == [1], "no block is free now"


def test_a24_a_head_that_needs_the_whole_host_gets_it_and_one_that_needs_more_never() -> None:
    waiting = [on_host(0, 4, 8), on_host(1, 4, 8)]
    assert ids(cpu_round(view([], waiting, capacity=8)).preempt) == [1]
    waiting = [on_host(0, 4, 9), on_host(1, 4, 8)]
    assert cpu_round(view([], waiting, capacity=8)).preempt == []


def test_a24_those_that_a_round_or_copy_touches_are_not_dropped() -> None:
    waiting = [on_host(0, 4, 8), on_host(1, 4, 8), on_host(2, 4, 8)]
    waiting[2].pins = 1
    assert ids(cpu_round(view([], waiting, capacity=12)).preempt) == [1]


# A.2.5 Commit and execute one CPU decode batch


def test_a25_only_the_next_tokens_block_is_allocated() -> None:
    state = make(gpu=1, host=64)
    fill_host(state, [0], 32, 64)
    assert state.host_pool.num_used == 2
    step = cpu(state)
    assert (step.rows[0].start, len(step.rows[0].blocks)) == (32, 3)
    assert state.host_pool.num_used == 3 and state.envelope.growth == 3, "b-hat is 6"
    cpu(state)
    assert state.host_pool.num_used == 3


def test_a25_finished_requests_release_their_kv_and_others_stay_ready() -> None:
    state = make(gpu=1, host=64)
    fill_host(state, [0, 1], 32)
    cpu(state, finished=[0])
    assert ids(state.cpu_running) == [1] and state.cpu_running[0].ready
    assert state.host_pool.num_used == 3
    while not state.idle:
        cpu(state)
    assert state.host_pool.num_used == 0


def test_the_engines_paces_are_independent() -> None:
    state = make(gpu=3, host=64)
    fill_host(state, [0], 64, 9)
    step = state.schedule_cpu()
    assert step is not None
    fill_host(state, [], 0)
    state.add(Request(9, 16, 20))
    for _ in range(5):
        gpu(state)
    assert state.requests[9].num_output == 5 and state.requests[0].num_output == 1
    state.apply_cpu(step, ())
    assert state.requests[0].num_output == 2
