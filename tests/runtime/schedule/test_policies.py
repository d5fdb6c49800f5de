"""The registry, and the two policies that dualpace is compared with."""

from typing import Any

import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.schedule import RowKind, State, make_policy
from dualpace.runtime.schedule.policies import POLICIES
from tests.runtime.schedule.drive import add, copies, decoding, fill_host, gpu, ids, make
from tests.runtime.schedule.predictor import FlatPredictor


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="dualpace, gpu_only, neo"):
        make_policy("vllm")


@pytest.mark.parametrize("name", ["dualpace", "gpu_only"])
def test_live_policies_need_no_options(name: str) -> None:
    assert name in POLICIES and make_policy(name).has_cpu_engine == (name == "dualpace")


def test_neo_without_predicted_times_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="needs predicted times"):
        make_policy("neo")


# gpu_only: continuous batching, chunked prefill, recompute preemption


def test_gpu_only_chunks_every_prompt_to_the_soft_limit_beside_the_decodes() -> None:
    state = make(policy="gpu_only", soft=20, hard=1024)
    add(state, 0, 8)
    add(state, 1, 30)
    assert [r.num_tokens for r in gpu(state).rows] == [8, 12]
    second = gpu(state)
    assert decoding(second) == [0] and [r.num_tokens for r in second.rows] == [1, 18]
    assert decoding(gpu(state)) == [0, 1]


def test_gpu_only_reserves_a_prompts_blocks_at_admission_and_keeps_it_at_the_head() -> None:
    state = make(gpu=8, policy="gpu_only", soft=20)
    add(state, 0, 80, 16)
    add(state, 1, 64, 16)
    gpu(state)
    assert state.gpu_pool.num_used == 5 and ids(state.waiting) == [0, 1]
    for _ in range(3):
        assert gpu(state).prefill_gpu == [0]
    assert ids(state.waiting) == [1], "its 4 blocks do not fit beside 5"


def test_gpu_only_drops_the_youngest_under_pressure_and_admits_nobody_in_that_round() -> None:
    state = make(gpu=4, policy="gpu_only")
    add(state, 0, 30, 20)
    add(state, 1, 30, 20)
    add(state, 2, 16, 20)
    for _ in range(3):
        gpu(state)  # to 32 tokens: both blocks of each are full
    step = gpu(state)
    assert decoding(step) == [0] and step.preempted == [1] and step.prefill_gpu == []
    assert ids(state.waiting) == [1, 2] and state.waiting[0].num_preemptions == 1


def test_gpu_only_uses_no_host_block() -> None:
    state = make(gpu=4, host=64, policy="gpu_only")
    add(state, 0, 60, 4)
    add(state, 1, 60, 4)
    while not state.idle:
        gpu(state)
        assert state.host_pool.capacity == 0 and state.schedule_cpu() is None


def test_gpu_only_applies_the_round_in_flight_before_it_drops_anybody() -> None:
    state = make(gpu=4, policy="gpu_only", look_ahead=True)
    add(state, 0, 30, 20)
    add(state, 1, 30, 3)
    gpu(state)
    gpu(state)
    flying = state.schedule_gpu()  # the last token of request 1
    assert flying is not None and state.schedule_gpu() is None
    state.apply_gpu(flying, ())
    assert decoding(gpu(state)) == [0]


# neo: section 3.1 and Equation 1


def neo(cpu_s: float = 0.01, needs_gpu_work: bool = True, **options: Any) -> State:
    predictor = FlatPredictor(cpu_s=cpu_s)
    policy = make_policy("neo", predictor=predictor, needs_gpu_work=needs_gpu_work)
    return make(policy=policy, **options)


def hosted(state: State, count: int, prompt_len: int = 32, keep: int = 3) -> list[int]:
    """GPU decode 0, and `count` requests on the host; returns the blocks that keep HBM nearly
    full.
    """
    add(state, 0, 16, 60)
    gpu(state)
    fill_host(state, list(range(1, count + 1)), prompt_len)
    return state.gpu_pool.allocate(state.gpu_pool.num_free - keep)


def test_neo_runs_host_rows_in_two_sub_batches_beside_gpu_work() -> None:
    state = neo()
    hosted(state, 3)
    step = state.schedule_gpu()
    assert step is not None and decoding(step) == [0]
    rows = [*step.host_rows[0], *step.host_rows[1]]
    assert sorted(ids(rows)) == [1, 2, 3] and all(r.kind >= RowKind.HOST_FIRST for r in rows)
    assert step.host_rows[1], "sub-batch 1 holds host rows alone"
    assert ids(state.apply_gpu(step, ()).sampled)[0] == 0
    assert [state.requests[i].num_output for i in (1, 2, 3)] == [2, 2, 2]
    assert ids(state.cpu_waiting) == [1, 2, 3] and state.cpu_running == []


def test_neo_admits_a_host_row_only_while_both_margins_of_equation_1_are_positive() -> None:
    state = neo(cpu_s=0.1)  # 33 tokens take 3.3 s; the linear floor of 4 s hides one a sub-batch
    hosted(state, 4)
    step = state.schedule_gpu()
    assert step is not None and [ids(rows) for rows in step.host_rows] == [[2], [1]]


def test_neo_hides_nothing_behind_too_short_gpu_work() -> None:
    state = neo(cpu_s=1.0)
    hosted(state, 2)
    step = state.schedule_gpu()
    assert step is not None and step.host_rows == ([], []) and decoding(step) == [0]


def test_neo_runs_nothing_on_the_host_without_gpu_work() -> None:
    state = neo()
    hosted(state, 2, keep=0)
    state.cancel(0)
    state.gpu_pool.allocate(state.gpu_pool.num_free)
    assert state.schedule_gpu() is None and state.schedule_cpu() is None


def test_neo_pipelines_only_if_that_serves_more_rows_a_second() -> None:
    class Slow(FlatPredictor):
        def linear_s(self, num_rows: int) -> float:
            return 10.0 * num_rows**2  # rows beside others cost more than they bring

    state = make(policy=make_policy("neo", predictor=Slow(cpu_s=0.001)))
    hosted(state, 2)
    step = state.schedule_gpu()
    assert step is not None and not any(step.host_rows)


def test_neo_sends_prompts_to_the_host_when_hbm_is_full_and_swaps_the_head_in_when_it_is_not() -> (
    None
):
    state = neo(gpu=4, host=64)
    add(state, 0, 30, 4)
    add(state, 1, 60, 4)
    step = gpu(state)
    assert step.prefill_gpu == [0] and step.prefill_cpu == [1]
    state.cancel(0)
    step = state.schedule_gpu()
    assert step is not None and step.swap_in == [1]
    state.apply_gpu(step, ())
    state.transfer_done(copies(step))
    state.check()


def test_neo_waits_for_copies_that_hold_staging() -> None:
    state = neo(gpu=4, host=64)
    add(state, 0, 30, 4)
    add(state, 1, 60, 4)
    step = gpu(state, report=False)
    assert step.prefill_cpu == [1] and state.schedule_gpu() is None
    state.transfer_done(copies(step))
    assert decoding(gpu(state)) == [0]


def test_neo_takes_no_more_host_rows_than_the_cpu_has_room_for() -> None:
    state = neo(cpu_rows=2, cpu_waiting=8)
    hosted(state, 4)
    step = state.schedule_gpu()
    assert step is not None and len([*step.host_rows[0], *step.host_rows[1]]) == 2


def test_neo_may_run_host_rows_by_themselves_in_two_sub_batches_of_like_kv() -> None:
    state = neo(needs_gpu_work=False)
    fill_host(state, [0], 160)
    fill_host(state, [1, 2, 3], 32)
    state.gpu_pool.allocate(state.gpu_pool.num_free)
    step = state.schedule_gpu()
    assert step is not None and not step.rows and not step.swap_in
    assert [ids(rows) for rows in step.host_rows] == [[0], [1, 2, 3]]
    assert ids(state.apply_gpu(step, ()).sampled) == [0, 1, 2, 3]


def test_neo_moves_nobody_while_a_round_is_in_flight() -> None:
    state = neo(gpu=4, look_ahead=True)
    add(state, 0, 30, 20)
    add(state, 1, 30, 20)
    gpu(state)
    gpu(state)
    flying = state.schedule_gpu()
    assert flying is not None and state.schedule_gpu() is None, "the next needs a third block each"
    state.apply_gpu(flying, ())
    step = gpu(state)
    assert decoding(step) == [0] and step.swap_out == [1]


def test_neo_lets_no_round_ahead_pass_a_swap_in_that_is_due() -> None:
    """Decodes scheduled ahead one after another must not keep the host queue where it is."""
    state, _, others = looking_ahead(1)
    first, second = state.schedule_gpu(), state.schedule_gpu()
    assert first is not None and second is not None and not second.swap_in, "HBM is nearly full"
    state.gpu_pool.free(others)
    state.apply_gpu(first, ())
    assert state.schedule_gpu() is None, "the next round takes the head in, so it is not ahead"
    state.apply_gpu(second, ())
    assert gpu(state).swap_in == [1]


def looking_ahead(count: int) -> tuple[State, FlatPredictor, list[int]]:
    """A decode and host rows, that nothing hides while `cpu_s` is 1, in a full HBM."""
    predictor = FlatPredictor(cpu_s=1.0)
    state = make(policy=make_policy("neo", predictor=predictor), look_ahead=True)
    return state, predictor, hosted(state, count)


def test_neo_schedules_host_rows_behind_a_round_in_flight_and_none_behind_themselves() -> None:
    state, predictor, others = looking_ahead(2)
    plain = state.schedule_gpu()
    predictor.cpu_s = 0.01
    paired = state.schedule_gpu()
    assert plain is not None and not plain.has_host_rows
    assert paired is not None and paired.has_host_rows and decoding(paired) == [0]
    state.apply_gpu(plain, ())
    assert sorted(ids(state.cpu_running)) == [1, 2], "until their own round is applied"
    assert state.schedule_gpu() is None, "the next takes them again, whose tokens must be known"
    state.apply_gpu(paired, ())
    state.gpu_pool.free(others)
    state.check()
    assert ids(state.cpu_waiting) == [1, 2] and not state.cpu_running
    assert [state.requests[i].num_output for i in (1, 2)] == [2, 2]


def test_neo_schedules_a_round_that_takes_no_host_row_behind_one_that_does() -> None:
    state, predictor, others = looking_ahead(1)
    predictor.cpu_s = 0.01
    paired = state.schedule_gpu()
    predictor.cpu_s = 1.0
    plain = state.schedule_gpu()
    assert paired is not None and paired.has_host_rows
    assert plain is not None and decoding(plain) == [0] and not plain.has_host_rows
    state.apply_gpu(paired, ())
    assert ids(state.cpu_waiting) == [1] and not state.cpu_running
    state.apply_gpu(plain, ())
    state.gpu_pool.free(others)
    state.check()
    assert state.requests[1].num_output == 2


def test_neo_lets_no_round_ahead_pass_the_swap_in_of_a_host_row_in_flight() -> None:
    state, predictor, others = looking_ahead(1)
    predictor.cpu_s = 0.01
    paired = state.schedule_gpu()
    assert paired is not None and paired.has_host_rows
    predictor.cpu_s = 1.0
    state.gpu_pool.free(others)
    assert state.schedule_gpu() is None, "the next takes it into HBM"
    state.apply_gpu(paired, ())
    assert gpu(state).swap_in == [1]


def test_neo_waits_for_the_copies_of_those_it_would_swap_out() -> None:
    state = neo(gpu=4, host=64)
    fill_host(state, [0, 1], 31, 30)
    step = gpu(state, report=False)
    assert step.swap_in == [0, 1] and state.gpu_pool.num_free == 0
    assert state.schedule_gpu() is None, "no block for a next token, and both are still arriving"
    state.transfer_done(copies(step))
    assert gpu(state).swap_out == [1]
