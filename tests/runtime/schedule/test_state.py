"""The state machine around the rounds: cancels, transfers, worker losses, refusals."""

import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.schedule import Limits, RequestTooLong, State, make_policy
from dualpace.runtime.schedule.loss import remains
from dualpace.runtime.types import Owner, Phase, Request
from tests.runtime.schedule.drive import add, copies, cpu, decoding, fill_host, gpu, ids, make
from tests.runtime.schedule.predictor import FlatPredictor


def empty(state: State) -> bool:
    state.check()
    return state.idle and state.gpu_pool.num_used == state.host_pool.num_used == 0


# Refusals


def test_a_request_longer_than_both_tiers_is_refused_with_a_sentence() -> None:
    state = make(gpu=4, host=4, hard=1024)
    add(state, 0, 60, 5)
    with pytest.raises(RequestTooLong, match="KV for 65 tokens, the limit is 64"):
        add(state, 1, 60, 6)
    assert list(state.requests) == [0]


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(0, 5), (5, 0)])
def test_a_request_without_prompt_or_answer_is_refused(prompt_len: int, max_tokens: int) -> None:
    state = make()
    with pytest.raises(RequestTooLong, match="both must be at least 1"):
        add(state, 0, prompt_len, max_tokens)
    assert not state.requests


def test_a_prompt_for_the_host_alone_must_be_one_forward() -> None:
    state = make(gpu=4, host=64, soft=64, hard=128)
    assert state.context_limit == 128
    add(state, 0, 100, 29)
    with pytest.raises(RequestTooLong, match="one forward of at most 128"):
        add(state, 1, 100, 30)


def test_without_a_cpu_engine_hbm_alone_is_the_limit() -> None:
    assert make(gpu=4, host=64, policy="gpu_only").context_limit == 64


@pytest.mark.parametrize("wrong", [{"soft": 0}, {"gpu_rows": 0}, {"soft": 64, "hard": 63}])
def test_limits_that_admit_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        make(**wrong)  # type: ignore[arg-type]
    assert Limits().host_admission == Limits().cpu_rows


# Cancels, in every state


def test_cancel_while_waiting_and_twice() -> None:
    state = make()
    add(state, 0, 16)
    assert state.cancel(0) and not state.cancel(0) and not state.cancel(7)
    assert empty(state)


def test_cancel_with_a_gpu_row_in_flight_frees_at_apply() -> None:
    state = make()
    add(state, 0, 40)
    step = state.schedule_gpu()
    assert step is not None and state.cancel(0)
    assert state.gpu_pool.num_used == 3 and not state.idle
    applied = state.apply_gpu(step, {0})
    assert applied.batch == applied.sampled == [] and ids(applied.dropped) == [0]
    assert empty(state)


def test_cancel_between_chunks_of_a_prompt() -> None:
    state = make(soft=32, hard=32)
    add(state, 0, 100)
    gpu(state)
    state.cancel(0)
    assert empty(state)


@pytest.mark.parametrize("report_first", [True, False])
def test_cancel_during_prefill_to_cpu(report_first: bool) -> None:
    state = make(gpu=1, host=16)
    add(state, 0, 40)
    step = state.schedule_gpu()
    assert step is not None and state.cancel(0)
    for report in (report_first, not report_first):
        assert state.host_pool.num_used == 3
        if report:
            state.transfer_done(copies(step))
        else:
            state.apply_gpu(step, ())
    assert empty(state)


def test_cancel_during_a_swap_out_frees_both_ends_at_the_report() -> None:
    state = make(gpu=3, host=16)
    add(state, 0, 16, 17)
    add(state, 1, 32, 17)
    gpu(state)
    step = gpu(state, report=False)
    assert step.swap_out == [1] and state.cancel(1)
    assert (state.gpu_pool.num_used, state.host_pool.num_used) == (3, 2)
    state.transfer_done(copies(step))
    assert (state.gpu_pool.num_used, state.host_pool.num_used) == (2, 0)
    state.cancel(0)
    assert empty(state)


def test_cancel_during_a_swap_in() -> None:
    state = make(gpu=16, host=16)
    fill_host(state, [0], 32)
    step = state.schedule_gpu()
    assert step is not None and step.swap_in == [0] and state.cancel(0)
    state.apply_gpu(step, ())
    assert (state.gpu_pool.num_used, state.host_pool.num_used) == (3, 2)
    state.transfer_done(copies(step))
    assert empty(state)


def test_cancel_with_a_cpu_row_in_flight_and_with_a_mark() -> None:
    state = make(gpu=8, host=16)
    fill_host(state, [0, 1], 32, 17)
    step = state.schedule_cpu()
    assert step is not None
    add(state, 2, 16, 2)
    assert gpu(state).marked == [0, 1]
    state.cancel(0)
    assert ids(state.marked) == [1] and state.host_pool.num_used == 6
    state.apply_cpu(step, ())
    assert state.host_pool.num_used == 3
    state.cancel(1)
    state.cancel(2)
    assert empty(state)


# A prompt to the host that ends with its first token


def test_host_blocks_of_a_request_that_ends_with_its_first_token_are_free_after_its_copies() -> (
    None
):
    state = make(gpu=1, host=16)
    add(state, 0, 40)
    step = state.schedule_gpu()
    assert step is not None
    applied = state.apply_gpu(step, {0})
    assert ids(applied.finished) == [0] and state.host_pool.num_used == 3
    state.transfer_done(copies(step))
    assert empty(state)


def test_planned_becomes_used_at_the_report() -> None:
    state = make(gpu=1, host=16)
    add(state, 0, 40)
    step = gpu(state, report=False)
    assert (state.envelope.used, state.envelope.planned) == (0, 3)
    state.transfer_done(copies(step))
    assert (state.envelope.used, state.envelope.planned) == (3, 0)


def test_an_unknown_transfer_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="never started"):
        make().transfer_done([1])


# Recompute


def test_a_recomputed_request_gets_exactly_the_rest_of_its_tokens() -> None:
    state = make(gpu=8, host=0, policy="gpu_only")
    add(state, 0, 48, 40)
    add(state, 1, 48, 40)
    outputs = {0: 0, 1: 0}
    preempted: list[int] = []
    while not state.idle:
        step = state.schedule_gpu()
        assert step is not None
        preempted += step.preempted
        for request in state.apply_gpu(step, ()).sampled:
            outputs[request.id] += 1
        state.check()
    assert preempted and set(preempted) == {1} and outputs == {0: 40, 1: 40}


# Worker losses


def test_a_dead_gpu_worker_sends_its_requests_to_the_front_in_arrival_order() -> None:
    state = make(gpu=9, host=64)
    add(state, 0, 16, 9)
    add(state, 1, 32, 9)
    gpu(state)
    fill_host(state, [2], 96)
    add(state, 3, 128, 4)
    add(state, 4, 900, 4)
    step = state.schedule_gpu()
    assert step is not None and step.prefill_cpu == [3] and decoding(step)[:2] == [0, 1]
    lost = state.lose_gpu()
    assert ids(lost) == [r for r in (0, 1, 2, 3) if state.requests[r].phase is Phase.WAITING]
    assert ids(state.waiting) == [*ids(lost), 4]
    assert state.gpu_pool.num_used == 0 and state.planned == 0 and not state.staging
    assert all(r.kv_len == 0 and not r.blocks and r.in_flight == 0 for r in lost)
    state.check()
    state.transfer_done(copies(step))  # a late report of a void copy changes nothing
    state.check()
    assert gpu(state).preempted == ids(lost)


def test_losing_the_gpu_during_a_swap_in_frees_the_host_copy_too() -> None:
    state = make(gpu=16, host=16)
    fill_host(state, [0], 32)
    step = state.schedule_gpu()
    assert step is not None and step.swap_in == [0]
    assert ids(state.lose_gpu()) == [0]
    assert state.host_pool.num_used == state.gpu_pool.num_used == 0
    state.check()


def test_of_a_lost_round_the_copies_that_had_ended_remain() -> None:
    state = make(gpu=4, host=16)
    add(state, 0, 30, 40)
    add(state, 1, 30, 40)
    while not (step := state.schedule_gpu()).swap_out:
        assert remains(step, []) is None
        state.apply_gpu(step, ())
    assert remains(step, [state.requests[i] for i in step.swap_out]) is None
    state.transfer_done(copies(step))
    left = remains(step, state.lose_gpu())
    assert left is not None and left.step.swap_out == step.swap_out and left.batch == []
    assert not left.step.prefill_gpu and not left.step.marked


def test_losing_the_gpu_leaves_host_residents_alone() -> None:
    state = make(gpu=1, host=64)
    fill_host(state, [0], 32)
    step = state.schedule_cpu()
    assert step is not None and state.lose_gpu() == []
    state.apply_cpu(step, ())
    assert state.requests[0].num_output == 2 and state.requests[0].owner is Owner.CPU


def test_a_dead_cpu_worker_loses_no_token() -> None:
    state = make(gpu=1, host=64)
    fill_host(state, [0], 32)
    first = state.schedule_cpu()
    assert first is not None
    state.lose_cpu()
    state.check()
    again = cpu(state)
    assert (again.rows[0].start, again.rows[0].blocks) == (32, first.rows[0].blocks)
    assert state.requests[0].num_output == 2


def test_a_prompt_that_was_half_computed_starts_again() -> None:
    state = make(soft=32, hard=32)
    add(state, 0, 100)
    gpu(state)
    assert state.waiting[0].kv_len == 32 and ids(state.lose_gpu()) == [0]
    assert state.gpu_pool.num_used == 0 and ids(state.waiting) == [0]
    assert gpu(state).rows[0].start == 0


def test_host_rows_of_a_lost_lockstep_round_are_computed_again_in_place() -> None:
    policy = make_policy("neo", predictor=FlatPredictor(), needs_gpu_work=False)
    state = make(policy=policy)
    fill_host(state, [0, 1], 32)
    shut = state.gpu_pool.allocate(state.gpu_pool.num_free)
    step = state.schedule_gpu()
    assert step is not None and step.host_rows[0] and step.host_rows[1]
    state.gpu_pool.free(shut)
    assert state.lose_gpu() == [] and ids(state.cpu_waiting) == [0, 1]
    assert [(r.kv_len, r.in_flight, r.num_output) for r in state.cpu_waiting] == [(32, 0, 1)] * 2
    state.check()


def test_cancelled_rows_of_a_lost_step_are_freed() -> None:
    state = make(gpu=1, host=64)
    fill_host(state, [0], 32)
    assert state.schedule_cpu() is not None and state.cancel(0)
    state.lose_cpu()
    add(state, 1, 16, 4)
    assert state.schedule_gpu() is not None and state.cancel(1)
    state.lose_gpu()
    assert empty(state)


def test_a_request_belongs_to_one_state_once() -> None:
    state = make()
    request = add(state, 0, 16)
    with pytest.raises(AssertionError, match="already here"):
        state.add(Request(request.id, 16, 4))
