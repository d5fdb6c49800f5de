"""Beyond the paper: who the host takes when times are predicted, and prompts in chunks."""

import pytest

from dualpace.runtime.schedule import State, make_policy
from dualpace.runtime.schedule.estimate import Quantile
from dualpace.runtime.schedule.host_admission import ProfiledAdmission
from dualpace.runtime.step_times import Curve, StepTimes
from tests.runtime.schedule.drive import add, cpu, decoding, fill_host, gpu, ids, make
from tests.runtime.schedule.predictor import flat_times

# A GPU round takes 1 s, and so does a prefill.


def full_hbm(times: StepTimes | None, waiting: int, outputs: int = 20) -> State:
    """One decode with 8 tokens left holds HBM; as many prompts wait as are told."""
    state = make(
        gpu=4, host=400, policy=make_policy("dualpace", admission=ProfiledAdmission(times))
    )
    add(state, 0, 48, 9)
    gpu(state)
    for request_id in range(1, waiting + 1):
        add(state, request_id, 40, outputs)
    return state


def test_without_predicted_times_the_host_takes_whoever_fits() -> None:
    assert gpu(full_hbm(None, 1)).prefill_cpu == [1]


@pytest.mark.parametrize(("waiting", "taken"), [(1, []), (2, [1]), (12, [1])])
def test_a_prompt_waits_for_hbm_until_its_wait_costs_those_behind_more(
    waiting: int, taken: list[int]
) -> None:
    """On the host each token comes 5 s later. The only decode bears whole rounds: all behind it
    lose 1 s a token, all others are relieved of 1 s, and half as many again are on their way."""
    state = full_hbm(flat_times(cpu=6.0), waiting)
    assert gpu(state).prefill_cpu[:1] == taken


def test_a_prompt_that_waits_goes_to_hbm_when_the_decode_has_ended() -> None:
    state = full_hbm(flat_times(cpu=6.0), 1)
    for _ in range(9):
        step = gpu(state)
    assert ids(state.gpu_running) == [1] and not step.prefill_cpu


def test_without_assists_that_pay_the_tier_is_judged_by_its_own_pace() -> None:
    """However many wait: 50 s of the GPU an iteration are more than any rows are worth."""
    assert gpu(full_hbm(flat_times(cpu=1.5, assist=50.0, alone=99.0), 12)).prefill_cpu == []
    assert gpu(full_hbm(flat_times(cpu=1.5, assist=50.0, alone=1.5), 12)).prefill_cpu
    assert gpu(full_hbm(flat_times(cpu=1.5, assist=0.5, alone=99.0), 12)).prefill_cpu


def test_a_tier_that_only_a_few_could_use_starts_for_the_company_that_is_to_come() -> None:
    """An iteration's assists take 3 s of the GPU, too much for two rows and not for three."""
    times = flat_times(cpu=5.0, assist=3.0, alone=99.0)
    assert gpu(full_hbm(times, 4)).prefill_cpu == []
    assert gpu(full_hbm(times, 6)).prefill_cpu


@pytest.mark.parametrize(("residents", "assists"), [(0, True), (1, True), (3, True), (4, False)])
def test_host_rows_are_assisted_while_hbm_loses_no_more_tokens_than_they_gain(
    residents: int, assists: bool
) -> None:
    """Two host rows, and 0.6 s of the GPU an iteration, whose rounds of a second make a token for
    each of `residents`."""
    times = flat_times(cpu=1.0, assist=0.6)
    state = make(gpu=9, policy=make_policy("dualpace", admission=ProfiledAdmission(times)))
    for request_id in range(residents):
        add(state, request_id, 16, 9)
    if residents:
        gpu(state)
    fill_host(state, (10, 11), 40)
    step = cpu(state)
    assert ids(step.rows) == [10, 11] and step.may_assist == assists


def test_what_hbm_alone_could_never_hold_goes_to_the_host_at_once() -> None:
    state = make(
        gpu=4,
        host=400,
        policy=make_policy("dualpace", admission=ProfiledAdmission(flat_times(cpu=99.0))),
    )
    add(state, 0, 200, 9)
    assert gpu(state).prefill_cpu == [0]


@pytest.mark.parametrize("assist", [0.1, 50.0])
def test_a_victim_goes_on_on_the_host_whatever_assists_cost(assist: float) -> None:
    times = flat_times(cpu=3.0, assist=assist, prefill=0.1)
    estimator = Quantile(first=1, warmup=10**9)  # admission keeps no room for growth
    policy = make_policy("dualpace", admission=ProfiledAdmission(times))
    state = make(gpu=4, policy=policy, estimator=estimator)
    add(state, 0, 31, 40)
    add(state, 1, 31, 40)
    for _ in range(2):
        gpu(state)
    step = gpu(state)
    assert decoding(step) == [0]
    assert (step.preempted, step.swap_out) == ([], [1])


def with_one_on_the_host(times: StepTimes | None, waiting: int, blocks: int = 8) -> State:
    """One decode holds 3 blocks of HBM and is promised 6; so is one on the host, which needs 3."""
    admission = ProfiledAdmission(None)
    state = make(gpu=blocks, policy=make_policy("dualpace", admission=admission))
    add(state, 0, 33)
    gpu(state)
    fill_host(state, (1,), 33)
    admission.times = times
    for request_id in range(2, waiting + 2):
        add(state, request_id, 96, 20)
    return state


@pytest.mark.parametrize(
    ("cpu", "waiting", "home"), [(9.0, 0, [1]), (9.0, 1, [1]), (9.0, 2, []), (1.5, 1, [])]
)
def test_who_is_on_the_host_comes_home_as_a_prompt_would_while_the_tier_loses_and_few_wait(
    cpu: float, waiting: int, home: list[int]
) -> None:
    """The two finish peaks do not fit in HBM together."""
    assert gpu(with_one_on_the_host(flat_times(cpu=cpu), waiting)).swap_in == home


def test_without_predicted_times_nobody_comes_home_whom_hbm_could_not_keep() -> None:
    assert gpu(with_one_on_the_host(None, 0)).swap_in == []


def test_a_running_host_request_is_called_home_by_a_mark_and_comes_at_its_boundary() -> None:
    state = with_one_on_the_host(flat_times(cpu=9.0), 0)
    cpu(state)
    assert gpu(state).marked == [1]
    assert state.schedule_cpu() is None, "it yields"
    assert gpu(state).swap_in == [1]


@pytest.mark.parametrize(("blocks", "home"), [(6, []), (7, [1])])
def test_nobody_comes_home_into_the_last_blocks(blocks: int, home: list[int]) -> None:
    """3 blocks are held and it needs 3; one more for each who decodes there is to be free, or it
    would soon have to leave again."""
    state = with_one_on_the_host(flat_times(cpu=9.0), 0, blocks)
    assert gpu(state).swap_in == home


def test_prompts_for_hbm_are_cut_at_the_soft_limit_and_host_prompts_are_not() -> None:
    state = make(gpu=8, soft=64, policy=make_policy("dualpace", chunk_prompts=True))
    add(state, 0, 100)
    add(state, 1, 100)
    first = gpu(state)
    assert [r.num_tokens for r in first.rows] == [64] and not first.rows[0].sample
    second = gpu(state)
    assert [(r.request.id, r.num_tokens) for r in second.rows] == [(0, 36), (1, 100)]
    assert second.prefill_cpu == [1]


def test_curves_are_level_before_the_first_point_and_go_on_straight() -> None:
    curve = Curve((10.0, 20.0, 40.0), (1.0, 2.0, 6.0))
    assert [curve(x) for x in (1, 10, 15, 40, 50)] == [1.0, 1.0, 1.5, 6.0, 8.0]


def test_step_times_survive_a_file_and_refuse_what_is_no_curve() -> None:
    times = flat_times()
    assert StepTimes.from_points(times.points()) == times
    points = times.points() | {"prefill": [[2, 1.0], [1, 1.0]]}
    with pytest.raises(ValueError, match="prefill"):
        StepTimes.from_points(points)
    del points["assist"]
    with pytest.raises(KeyError):
        StepTimes.from_points(points)


def test_only_rounds_that_the_other_engine_decides_by_count_as_changes() -> None:
    state = make(gpu=16, host=16)
    add(state, 0, 16)
    before = state.changes
    gpu(state)
    assert state.changes > before, "a prompt was admitted"
    before = state.changes
    gpu(state)
    assert state.changes == before, "the same decodes"
