"""Beyond the paper: who the host takes when times are predicted, and prompts in chunks."""

from dataclasses import replace

import pytest

from dualpace.runtime.schedule import State, make_policy
from dualpace.runtime.schedule.estimate import Quantile
from dualpace.runtime.schedule.host_admission import ProfiledAdmission, Tiers
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


def pays_at(rows: int) -> StepTimes:
    """A batch of so many rows takes no time, others 99 s; none is worth its assists."""
    before = [(rows - 0.5, 99.0)] if rows > 1 else []
    points = (*before, (float(rows), 0.0), (rows + 0.5, 99.0), (99.0, 99.0))
    return replace(flat_times(assist=50.0), cpu_alone=Curve(*zip(*points, strict=True)))


@pytest.mark.parametrize(("rows", "taken"), [(1, True), (3, False), (4, True), (6, True)])
def test_a_tier_is_tried_with_one_more_at_doubled_sizes_and_with_all_the_company(
    rows: int, taken: bool
) -> None:
    """12 wait, half of them as company."""
    assert bool(gpu(full_hbm(pays_at(rows), 12)).prefill_cpu) == taken


@pytest.mark.parametrize(("rows", "taken"), [(1, False), (2, True), (4, True), (8, False)])
def test_a_tier_that_has_one_is_tried_from_two_on_and_never_beyond_the_company(
    rows: int, taken: bool
) -> None:
    state = with_one_on_the_host(pays_at(rows), 12)
    assert bool(gpu(state).prefill_cpu) == taken


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


def test_without_predicted_times_host_rows_are_assisted_by_size_alone() -> None:
    state = make(gpu=9, policy=make_policy("dualpace", admission=ProfiledAdmission(None)))
    add(state, 0, 16, 9)
    gpu(state)
    fill_host(state, (1,), 40)
    assert cpu(state).may_assist


def tiers(**changed: float) -> Tiers:
    """A round of a second makes a token for each of 4 residents; 3 prompts wait for them. 2 on the
    host have 100 KV tokens, each of which takes 0.01 s there, a resident 50. An iteration takes 4 s
    beside that, and 8 without its assists, which take the GPU 1 s."""
    times = StepTimes(
        gpu_dense=level(1.0),
        gpu_attention=level(0.0),
        cpu_dense=level(4.0),
        cpu_attention=Curve((1.0, 2.0), (0.01, 0.02)),
        cpu_alone=level(8.0),
        cpu_wait=level(0.0),
        assist=level(1.0),
        prefill=level(2.0),
    )
    now = {"resident": 4, "on_host": 2, "host_tokens": 100, "behind": 3}
    now |= {"answer": 8.0, "context": 50.0, "round_s": 1.0}
    return Tiers(times=times, **now | changed)


def level(seconds: float) -> Curve:
    return Curve((1.0, 2.0), (seconds, seconds))


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(1, 8 + 1.0), (2, 8 + 1.0), (3, 8 + 1.5), (4, 4 + 2.0), (6, 4 + 3.0)],
)
def test_an_iteration_is_longer_by_the_kv_of_who_joins_and_shorter_by_assists_that_pay(
    rows: int, seconds: float
) -> None:
    """With 4 rows and more the assists' second makes no fewer tokens than a round's."""
    assert tiers().iteration_s(rows) == pytest.approx(seconds)


def test_a_token_on_the_host_saves_its_share_of_a_round_but_for_its_share_of_assists() -> None:
    saved = [tiers().saved_s(rows) for rows in (3, 4, 8)]
    assert saved == pytest.approx([1 / 4, 1 / 4 - 1 / 4, 1 / 4 - 1 / 8])


def test_a_tier_wins_by_what_all_others_gain_and_half_as_many_again() -> None:
    """Two rows are not assisted, so a token is 8 s later. Each that waits gains 1/4 s twice, as one
    of those behind and as one of all others, a resident once: 1.5 * (2 * 9 + 4) / 4 s for 9."""
    assert [tiers(behind=behind).wins(2) for behind in (8, 9)] == [False, True]
    # 8.25 s are gained, so a token may not be later by as much.
    assert not tiers(behind=9, host_tokens=125).wins(2)
    assert tiers(behind=9, host_tokens=124).wins(2)


@pytest.mark.parametrize(("behind", "answer", "company"), [(3, 8.0, 1), (40, 8.0, 18), (40, 2, 4)])
def test_company_is_half_of_those_who_wait_and_of_those_computed_in_an_answers_time(
    behind: int, answer: float, company: int
) -> None:
    """An answer of 8 takes 72 s at 9 s an iteration, in which 36 prompts of 2 s are computed."""
    assert tiers(behind=behind, answer=answer).company(2) == company


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


def with_one_on_the_host(
    times: StepTimes | None,
    waiting: int,
    blocks: int = 8,
    *,
    host_blocks: int = 64,
    length: int = 33,
) -> State:
    """One decode holds 3 blocks of HBM and is promised 6; so is one on the host, which needs 3."""
    admission = ProfiledAdmission(None)
    state = make(blocks, host_blocks, policy=make_policy("dualpace", admission=admission))
    add(state, 0, 33)
    gpu(state)
    fill_host(state, (1,), length)
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


@pytest.mark.parametrize(("host_blocks", "home"), [(11, []), (12, [1])])
def test_who_comes_home_leaves_the_host_room_for_its_eviction(
    host_blocks: int, home: list[int]
) -> None:
    """3 blocks of the host are its own until it has come, 6 are for the tail of HBM by Equation 4,
    and 3 for the growth of the head of an idle CPU tier."""
    state = with_one_on_the_host(flat_times(cpu=9.0), 0, host_blocks=host_blocks)
    assert gpu(state).swap_in == home


@pytest.mark.parametrize(("length", "blocks"), [(30, 5), (31, 4)])
def test_a_mark_of_who_is_called_home_keeps_the_blocks_that_it_needs_now(
    length: int, blocks: int
) -> None:
    """7 are free; with its first token on the host it has one more than `length`, and then needs
    room for the next."""
    for prompt, taken in ((16 * blocks, [2]), (16 * blocks + 1, [])):
        state = with_one_on_the_host(flat_times(cpu=9.0), 0, 10, length=length)
        cpu(state)
        assert gpu(state).marked == [1]
        add(state, 2, prompt, 20)
        assert gpu(state).prefill_gpu == taken


@pytest.mark.parametrize(("blocks", "home"), [(6, []), (7, [1])])
def test_nobody_comes_home_into_the_last_blocks(blocks: int, home: list[int]) -> None:
    """3 blocks are held and it needs 3; one more for each who decodes there is to be free, or it
    would soon have to leave again."""
    state = with_one_on_the_host(flat_times(cpu=9.0), 0, blocks)
    assert gpu(state).swap_in == home


@pytest.mark.parametrize(("blocks", "home"), [(5, []), (6, [1])])
def test_nobody_comes_home_whom_hbm_could_never_hold_to_its_end(
    blocks: int, home: list[int]
) -> None:
    """Its finish peak is 6 blocks: it would drive out all others, and have to leave after all."""
    admission = ProfiledAdmission(None)
    state = make(blocks, policy=make_policy("dualpace", admission=admission))
    add(state, 0, 1)
    gpu(state)
    fill_host(state, (1,), 33)
    admission.times = flat_times(cpu=9.0)
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
