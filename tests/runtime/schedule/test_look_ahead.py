"""A second GPU round scheduled while one is in flight."""

from dualpace.runtime.schedule import GpuStep, State
from tests.runtime.schedule.drive import add, decoding, fill_host, gpu, ids, make


def two_ahead(state: State) -> tuple[GpuStep, GpuStep]:
    first, second = state.schedule_gpu(), state.schedule_gpu()
    assert first is not None and second is not None
    assert state.schedule_gpu() is None, "two rounds at most"
    state.check()
    return first, second


def test_the_round_ahead_sees_each_row_one_token_longer() -> None:
    state = make(look_ahead=True)
    add(state, 0, 31, 20)
    first, second = two_ahead(state)
    assert [(r.start, r.context_len) for r in first.rows] == [(0, 31)]
    assert [(r.start, r.context_len) for r in second.rows] == [(31, 32)]
    assert len(first.rows[0].blocks) == 2, "a decode after a prompt of 31 needs no block"


def test_rows_that_reach_their_token_limit_are_gone() -> None:
    state = make(look_ahead=True)
    add(state, 0, 16, 2)
    add(state, 1, 16, 9)
    gpu(state)
    first, second = two_ahead(state)
    assert decoding(first) == [0, 1] and decoding(second) == [1]
    assert ids(state.apply_gpu(first, ()).finished) == [0]
    state.check()


def test_the_extra_token_after_eos_is_dropped_and_its_blocks_are_freed_late() -> None:
    state = make(look_ahead=True)
    add(state, 0, 16, 20)
    add(state, 1, 16, 20)
    gpu(state)
    first, second = two_ahead(state)
    extra = set(second.rows[0].blocks)
    assert ids(state.apply_gpu(first, {0}).finished) == [0]
    state.check()
    third = state.schedule_gpu()
    assert third is not None and decoding(third) == [1]
    assert extra <= set(range(65)) - set(state.gpu_pool.allocate(state.gpu_pool.num_free)), (
        "still held"
    )


def test_freed_at_the_apply_of_the_later_round_and_never_counted() -> None:
    state = make(look_ahead=True)
    add(state, 0, 16, 20)
    gpu(state)
    first, second = two_ahead(state)
    state.apply_gpu(first, {0})
    assert state.gpu_pool.num_used == 2 and not state.idle
    applied = state.apply_gpu(second, {0})
    assert applied.batch == [] and ids(applied.dropped) == [0] and applied.sampled == []
    assert applied.dropped[0].num_output == 2
    assert state.gpu_pool.num_used == 0 and state.idle
    state.check()


def test_no_round_ahead_of_a_prefill_to_cpu_nor_with_one() -> None:
    state = make(gpu=1, host=64, look_ahead=True)
    add(state, 0, 64)
    assert state.schedule_gpu() is not None and state.schedule_gpu() is None

    state = make(gpu=3, host=64, look_ahead=True)
    add(state, 0, 16, 20)
    gpu(state)
    assert state.schedule_gpu() is not None
    add(state, 1, 64)
    assert state.schedule_gpu() is None, "the next round would hold a Prefill-to-CPU"


def test_no_round_ahead_with_a_swap_or_a_recompute() -> None:
    state = make(gpu=16, host=64, look_ahead=True)
    fill_host(state, [0], 32)
    first = state.schedule_gpu()
    assert first is not None and first.swap_in == [0] and state.schedule_gpu() is None

    state = make(gpu=4, host=64, look_ahead=True)
    add(state, 0, 32, 20)
    add(state, 1, 31, 20)
    gpu(state)
    assert len(state.gpu_running) == 2
    step = state.schedule_gpu()
    assert step is None or step.swap_out == [1]

    state = make(gpu=4, host=0, policy="gpu_only", look_ahead=True)
    add(state, 0, 31, 20)
    add(state, 1, 31, 20)
    gpu(state)
    assert state.schedule_gpu() is not None, "both fit to 32 tokens"
    assert state.schedule_gpu() is None, "the next round would drop one"


def test_no_round_ahead_when_a_row_needs_its_last_token_on_the_host() -> None:
    state = make(look_ahead=True)
    add(state, 0, 16, 20).needs_last_token = True
    assert state.schedule_gpu() is not None and state.schedule_gpu() is None


def test_chunks_may_be_scheduled_ahead() -> None:
    state = make(soft=32, hard=32, look_ahead=True)
    add(state, 0, 100, 4)
    first, second = two_ahead(state)
    assert (first.rows[0].start, second.rows[0].start) == (0, 32)


def test_it_can_be_switched_off() -> None:
    state = make(look_ahead=False)
    add(state, 0, 16)
    assert state.schedule_gpu() is not None and state.schedule_gpu() is None


def test_both_rounds_are_void_when_the_worker_dies() -> None:
    state = make(look_ahead=True)
    request = add(state, 0, 16, 3)
    gpu(state)
    two = state.schedule_gpu(), state.schedule_gpu()
    assert two[0] is not None and request.id in state.ending
    state.lose_gpu()
    state.check()
    assert request.num_output == 1 and request.prefill_len == 17 and ids(state.waiting) == [0]
