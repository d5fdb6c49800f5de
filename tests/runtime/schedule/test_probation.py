"""Whoever was in a round that its worker did not survive runs alone, and only a proven culprit is
given up.
"""

from collections.abc import Iterable

import pytest

from dualpace.runtime.schedule import CpuStep, GpuStep, State, make_policy
from dualpace.runtime.schedule.policies import POLICIES, Policy
from dualpace.runtime.types import Owner, Phase, Request
from tests.runtime.schedule.drive import add, copies, cpu, fill_host, gpu, ids, make
from tests.runtime.schedule.predictor import FlatPredictor

GPU, CPU = Owner.GPU, Owner.CPU


def fail_gpu(state: State) -> Request | None:
    """It is lost by its own fault; who is proven guilty."""
    culprit = state.accuse(GPU)
    if culprit is not None:
        state.cancel(culprit.id)
    state.lose_gpu()
    state.check()
    return culprit


def fail_cpu(state: State) -> Request | None:
    culprit = state.accuse(CPU)
    if culprit is not None:
        state.cancel(culprit.id)
    state.lose_cpu()
    state.check()
    return culprit


def batch(step: GpuStep | CpuStep | None) -> list[int]:
    return ids(step.all_rows) if step is not None else []


def serve(state: State, deadly: Iterable[int], only_decodes: bool = False) -> tuple[set[int], int]:
    """Runs until all have ended; the worker of a round with a deadly row is lost. Returns who was
    given up, and how many workers it took.
    """
    deadly, given_up, losses = set(deadly), set(), 0
    while not state.idle:
        for owner in (GPU, CPU):
            step = state.schedule_gpu() if owner is GPU else state.schedule_cpu()
            if step is None:
                continue
            rows = [r for r in step.all_rows if r.start or not only_decodes]
            if deadly & set(ids(rows)):
                losses += 1
                culprit = fail_gpu(state) if owner is GPU else fail_cpu(state)
                given_up |= {culprit.id} if culprit else set()
            elif isinstance(step, GpuStep):
                state.apply_gpu(step, ())
                state.transfer_done(copies(step))
            else:
                state.apply_cpu(step, ())
            state.check()
    assert state.gpu_pool.num_used == state.host_pool.num_used == 0 and not state.on_probation
    return given_up, losses


def policy(name: str) -> Policy:
    return make_policy(name, **({"predictor": FlatPredictor()} if name == "neo" else {}))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_of_a_lost_round_each_runs_alone_oldest_first_and_then_all_go_on(name: str) -> None:
    state = make(policy=policy(name))
    for i in range(3):
        add(state, i, 20)
    gpu(state)
    add(state, 3, 20)  # was in no round: waits until the suspects are clear
    assert batch(state.schedule_gpu()) == [0, 1, 2, 3]
    assert fail_gpu(state) is None
    late = add(state, 4, 20)
    assert [batch(gpu(state)) for _ in range(4)] == [[0], [1], [2], [3]]
    assert not state.on_probation and late.phase is Phase.WAITING
    assert batch(gpu(state)) == [0, 1, 2, 3, 4]


def test_nothing_else_is_on_the_device_while_a_suspect_is_tried() -> None:
    state = make(look_ahead=True)
    for i in range(2):
        add(state, i, 20)
    gpu(state)
    first, second = state.schedule_gpu(), state.schedule_gpu()
    assert batch(first) == batch(second) == [0, 1]
    assert fail_gpu(state) is None and [r.losses for r in state.waiting] == [1, 1]
    step = state.schedule_gpu()
    assert step is not None and batch(step) == [0] and state.schedule_gpu() is None
    state.apply_gpu(step, ())
    gpu(state)
    assert state.schedule_gpu() is not None and state.schedule_gpu() is not None


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_one_deadly_request_among_many_costs_itself_and_two_workers(name: str) -> None:
    state = make(policy=policy(name))
    for i in range(7):
        add(state, i, 20 + i, 9)
    assert serve(state, [4]) == ({4}, 2)


def test_deadly_requests_are_told_apart_and_one_that_is_alone_too() -> None:
    state = make(cpu_rows=2)
    for i in range(7):
        add(state, i, 40, 9)
    assert serve(state, [2, 5]) == ({2, 5}, 3)
    add(state, 7, 40, 9)
    assert serve(state, [7]) == ({7}, 2)


def test_a_row_that_only_decodes_kill_is_found_as_trials_grow_longer() -> None:
    state = make(gpu_rows=4)
    for i in range(4):
        add(state, i, 20, 9)
    assert serve(state, [1], only_decodes=True) == ({1}, 3)


def test_of_a_lost_iteration_each_runs_alone_on_the_host_and_the_order_stays() -> None:
    state = make(gpu=1, host=64)
    fill_host(state, [0, 1, 2], 32)
    assert batch(state.schedule_cpu()) == [0, 1, 2]
    kept = [list(r.blocks) for r in state.cpu_running]
    assert fail_cpu(state) is None
    assert [batch(cpu(state)) for _ in range(3)] == [[2], [1], [0]]
    assert [state.requests[i].blocks for i in range(3)] == kept, "KV on the host is not lost"
    assert batch(cpu(state)) == [0, 1, 2]


def test_a_deadly_request_on_the_host_is_given_up_there() -> None:
    state = make(gpu=1, host=64)
    fill_host(state, [0, 1, 2], 32, 9)
    assert serve(state, [1]) == ({1}, 2)


def test_host_rows_in_lockstep_are_suspects_of_both_workers_and_tried_in_place() -> None:
    state = make(policy=make_policy("neo", predictor=FlatPredictor(), needs_gpu_work=False))
    fill_host(state, [0, 1], 32)
    shut = state.gpu_pool.allocate(state.gpu_pool.num_free)  # so that nobody is swapped in

    def run() -> set[int]:
        step = state.schedule_gpu()
        assert step is not None and not step.rows
        state.apply_gpu(step, ())
        return {*batch(step)}

    assert state.schedule_gpu() is not None
    assert state.accuse(CPU) is None  # the CPU's worker fails, the other one is ended with it
    state.lose_gpu()
    assert [run() for _ in range(3)] == [{1}, {0}, {0, 1}]
    assert state.schedule_gpu() is not None and state.accuse(GPU) is None
    state.lose_gpu()
    assert run() == {1}
    assert batch(state.schedule_gpu()) == [1], "after a second loss it takes two tokens"
    assert state.accuse(GPU) is state.requests[1]
    state.cancel(1)
    state.lose_gpu()
    state.gpu_pool.free(shut)
    assert serve(state, []) == (set(), 0)


def test_a_prompt_in_pieces_is_tried_piece_by_piece() -> None:
    state = make(policy="gpu_only", soft=32, hard=32)
    add(state, 0, 20)
    gpu(state)
    add(state, 1, 70)
    state.schedule_gpu()
    assert fail_gpu(state) is None
    assert [batch(gpu(state)) for _ in range(4)] == [[0], [1], [1], [1]]
    assert not state.on_probation


def test_who_has_no_room_to_be_alone_waits_like_everybody() -> None:
    state = make(gpu=4, host=0, policy="gpu_only")
    add(state, 0, 20, 12)
    add(state, 1, 20, 12)
    gpu(state)
    state.schedule_gpu()
    assert fail_gpu(state) is None
    assert batch(gpu(state)) == [0]
    shut = state.gpu_pool.allocate(1)
    step = state.schedule_gpu()
    assert step is not None and batch(step) == [0] and list(state.on_probation) == [1]
    state.gpu_pool.free(shut)
    state.apply_gpu(step, ())
    assert batch(gpu(state)) == [1]
    assert serve(state, []) == (set(), 0)


def test_a_suspect_that_is_cancelled_is_forgotten() -> None:
    state = make()
    add(state, 0, 20)
    add(state, 1, 20)
    state.schedule_gpu()
    assert fail_gpu(state) is None
    assert batch(state.schedule_gpu()) == [0] and state.cancel(0) and state.cancel(1)
    assert fail_gpu(state) is None and state.idle


def test_a_round_without_rows_accuses_nobody() -> None:
    state = make(gpu=16, host=16)
    assert state.accuse(GPU) is None and state.accuse(CPU) is None
    fill_host(state, [0], 32)
    state.schedule_cpu()
    assert state.accuse(GPU) is None, "its row is the other worker's"
    state.check()
