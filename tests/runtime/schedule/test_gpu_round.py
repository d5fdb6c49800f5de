"""Appendix A.1, one paragraph after the other. Numbers in comments are blocks of 16 tokens."""

from dataclasses import replace

import pytest

from dualpace.runtime.schedule import GpuRound, State, TransferKind
from dualpace.runtime.schedule.estimate import Quantile
from dualpace.runtime.schedule.gpu_round import gpu_round
from dualpace.runtime.types import Owner
from tests.runtime.schedule.drive import add, copies, cpu, decoding, fill_host, gpu, ids, make


def short_estimates() -> Quantile:
    """Every answer is thought to end within a block: admission does not keep room for growth."""
    return Quantile(first=1, warmup=10**9)


# A.1.1 Establish a transfer-safe scheduling frontier


def test_a11_nothing_is_schedulable_until_the_prefill_to_cpu_copies_have_drained() -> None:
    state = make(gpu=2, host=32)
    add(state, 0, 16, 17)
    add(state, 1, 64)
    step = gpu(state, report=False)
    assert step.prefill_gpu == [0] and step.prefill_cpu == [1]
    assert state.schedule_gpu() is None
    assert state.schedule_cpu() is None, "its copies are not complete"
    state.transfer_done(copies(step))
    assert decoding(gpu(state)) == [0]
    assert ids(cpu(state).rows) == [1]


@pytest.mark.parametrize("report_first", [True, False])
def test_a11_a_host_prompt_is_ready_when_its_round_is_applied_and_its_copies_are_reported(
    report_first: bool,
) -> None:
    state = make(gpu=1, host=32)
    add(state, 0, 64)
    step = state.schedule_gpu()
    assert step is not None
    if report_first:
        state.transfer_done(copies(step))
    else:
        state.apply_gpu(step, ())
    assert not state.cpu_waiting[0].ready and state.schedule_cpu() is None
    if report_first:
        state.apply_gpu(step, ())
    else:
        state.transfer_done(copies(step))
    assert ids(cpu(state).rows) == [0]


# A.1.2 Restore next-token HBM feasibility


def crowded(gpu_blocks: int, host: int, prompts: list[int], **options: int) -> State:
    """All prompts are in HBM, multiples of 16 long: each needs a block for its next token."""
    state = make(gpu=gpu_blocks, host=host, **options)
    for index, length in enumerate(prompts):
        add(state, index, length, 32)
    step = gpu(state)
    assert step.prefill_gpu == list(range(len(prompts)))
    return state


def test_a12_no_eviction_while_the_next_tokens_fit() -> None:
    state = crowded(6, 32, [32, 32])  # 4 used, 2 needed, 2 free
    step = gpu(state)
    assert decoding(step) == [0, 1] and not step.transfers


def test_a12_the_tail_is_evicted_and_the_others_decode_in_the_same_round() -> None:
    state = crowded(7, 32, [32, 32, 32])  # 6 used, 3 needed, 1 free
    step = gpu(state, report=False)
    assert step.swap_out == [2] and decoding(step) == [0, 1]
    victim = step.transfers[0]
    assert victim.kind is TransferKind.SWAP_OUT and len(victim.src_blocks) == 2
    taken = {row.blocks[-1] for row in step.rows}
    assert len(taken & set(victim.src_blocks)) == 1, "one from the free list, one from the victim"
    assert ids(state.cpu_waiting) == [2] and not state.cpu_waiting[0].ready
    assert state.gpu_vacating == 1, "the block that nobody took is free after the report only"
    state.transfer_done([victim.id])
    assert state.gpu_vacating == 0 and ids(cpu(state).rows) == [2]


def test_a12_a_tail_that_the_host_cannot_take_is_skipped_for_an_earlier_one() -> None:
    state = crowded(10, 64, [16, 16, 96])  # 8 used, 3 needed, 2 free
    assert ids(gpu_round(state.view()).swap_out) == [2]
    scarce = gpu_round(replace(state.view(), host_free=5))
    assert ids(scarce.swap_out) == [1], "6 blocks do not fit in 5, 1 does"
    assert ids(scarce.decode) == [0, 2]


def test_a12_without_a_victim_the_subset_that_fits_decodes_in_queue_order() -> None:
    state = make(gpu=7, host=0, estimator=short_estimates())
    for index in range(3):
        add(state, index, 32, 32)
    gpu(state)
    assert len(state.gpu_running) == 3  # 6 used, 3 needed, 1 free, no host
    assert decoding(gpu(state)) == [0]
    assert decoding(gpu(state)) == [0], "the others wait"


def test_a12_when_nobody_can_grow_the_youngest_is_recomputed() -> None:
    state = make(gpu=6, host=0, estimator=short_estimates())
    for index in range(3):
        add(state, index, 32, 32)
    gpu(state)  # 6 used, 0 free
    step = gpu(state)
    assert step.preempted == [2] and decoding(step) == [0, 1]
    assert ids(state.waiting) == [2] and state.waiting[0].num_output == 1
    assert state.waiting[0].prefill_len == 33, "prompt and output so far"


def test_a12_evictions_that_free_too_little_make_a_round_of_migrations_only() -> None:
    state = crowded(4, 64, [16, 16, 16, 16])  # 4 used, 4 needed: two victims would do
    assert ids(gpu_round(state.view()).swap_out) == [3, 2]
    scarce = gpu_round(replace(state.view(), host_free=1))
    assert ids(scarce.swap_out) == [3] and scarce.decode == []


def test_a12_the_pressure_is_judged_again_when_the_transfers_are_complete() -> None:
    state = crowded(4, 64, [16, 16, 16, 16])
    view = replace(state.view(), gpu_vacating=1)
    assert gpu_round(view) == GpuRound(), "vacated blocks are on their way"


# A.1.3 Reserve host space for future GPU evictions


def test_a13_the_reserve_is_the_suffix_whose_peaks_hbm_cannot_hold() -> None:
    state = make(gpu=10, host=64)
    for index in range(3):
        add(state, index, 32, 33)  # peak 4 each
    gpu(state)
    assert state.envelope.migration == 4, "12 - 4 fits in 10"
    state.cancel(0)
    assert state.envelope.migration == 0


def test_a13_prompts_in_hbm_extend_the_reserve_only_as_far_as_equation_2_allows() -> None:
    for host, admitted in ((11, [0, 1]), (5, [0])):
        state = make(gpu=8, host=host)
        add(state, 0, 64, 32)  # 4 blocks now, peak 6
        add(state, 1, 64, 32)
        assert gpu(state).prefill_gpu == admitted
        assert state.envelope.migration == 6 * (len(admitted) - 1)


# A.1.4 Admit GPU decodes and relieve a saturated CPU tier


def test_a14_a_full_cpu_batch_with_a_backlog_gives_its_head_to_hbm_before_prompts() -> None:
    state = make(gpu=16, host=64, cpu_rows=1)
    fill_host(state, [0], 32)
    cpu(state)
    fill_host(state, [1], 32)  # waits behind a full batch
    add(state, 2, 100)
    step = gpu(state)
    assert step.swap_in == [1] and decoding(step) == [1]
    swap = next(t for t in step.transfers)
    assert swap.kind is TransferKind.SWAP_IN and len(swap.src_blocks) == len(swap.dst_blocks) == 2
    assert step.prefill_gpu == [2]


def test_a14_no_early_swap_in_while_the_cpu_batch_has_room() -> None:
    state = make(gpu=8, host=64, cpu_rows=2)
    fill_host(state, [0], 32)
    cpu(state)
    fill_host(state, [1], 32)
    add(state, 2, 100)  # takes 7 of 8 blocks, then nothing is left to swap in
    step = gpu(state)
    assert step.swap_in == [] and step.prefill_gpu == [2]


def test_a14_a_swap_in_needs_its_finish_peak_beside_all_others() -> None:
    state = make(gpu=10, host=64, cpu_rows=1)
    add(state, 0, 32, 65)  # peak 6
    gpu(state)
    fill_host(state, [1], 32, 65)  # peak 6: 12 > 10
    cpu(state)
    fill_host(state, [2], 32, 65)
    assert gpu(state).swap_in == []
    gpu(state, finished=[0])
    assert gpu(state).swap_in == [2]


def test_a14_host_blocks_of_a_swapped_in_request_are_free_after_the_report() -> None:
    state = make(gpu=16, host=64)
    fill_host(state, [0], 32)
    used = state.host_pool.num_used
    step = gpu(state, report=False)
    assert step.swap_in == [0] and state.host_pool.num_used == used == 2
    state.transfer_done(copies(step))
    assert state.host_pool.num_used == 0


# A.1.5 Admit prefills and choose their decode residency


def test_a15_a_prompt_goes_to_hbm_if_its_kv_fits_and_else_to_the_host() -> None:
    state = make(gpu=10, host=64)
    add(state, 0, 64, 2)
    add(state, 1, 112, 2)
    step = gpu(state)
    assert step.prefill_gpu == [0] and step.prefill_cpu == [1]
    assert state.requests[1].owner is Owner.CPU and len(state.requests[1].blocks) == 7


def test_a15_after_the_first_host_prompt_later_ones_do_not_pass_it_to_hbm() -> None:
    state = make(gpu=10, host=64)
    for index, length in enumerate((64, 112, 16)):
        add(state, index, length, 2)
    step = gpu(state)
    assert step.prefill_gpu == [0] and step.prefill_cpu == [1, 2]


def test_a15_the_prompt_that_crosses_the_soft_limit_is_the_last() -> None:
    state = make(soft=100, hard=400)
    for index in range(3):
        add(state, index, 90)
    assert gpu(state).prefill_gpu == [0, 1]


def test_a15_the_hard_limit_is_never_crossed() -> None:
    state = make(soft=100, hard=150)
    for index in range(3):
        add(state, index, 90)
    assert gpu(state).prefill_gpu == [0]


def test_a15_rows_end_admission() -> None:
    state = make(gpu_rows=2)
    for index in range(3):
        add(state, index, 16)
    assert gpu(state).prefill_gpu == [0, 1]


def test_a15_staging_bounds_the_host_prompts_of_one_round() -> None:
    state = make(gpu=1, host=64, staging=100)
    for index in range(3):
        add(state, index, 48, 2)
    assert gpu(state).prefill_cpu == [0, 1]


def test_a15_host_prompts_stop_at_the_decode_admission_limit() -> None:
    state = make(gpu=1, host=64, cpu_waiting=2)
    for index in range(3):
        add(state, index, 32, 4)
    assert gpu(state).prefill_cpu == [0, 1]
    assert state.schedule_gpu() is None
    cpu(state)
    assert gpu(state).prefill_cpu == [2]


def test_a15_no_admission_breaks_equation_2() -> None:
    state = make(gpu=4, host=9)
    add(state, 0, 64, 17)  # HBM, peak 5: it may need all of it on the host
    add(state, 1, 64, 17)
    step = gpu(state)
    assert step.prefill_gpu == [0] and state.envelope.migration == 5
    assert step.prefill_cpu == [], "4 planned and 1 to grow do not fit in 9 - 5"


def test_a15_admissions_leave_an_idle_cpu_tier_room_for_its_head_to_finish() -> None:
    state = make(gpu=9, host=12)
    fill_host(state, [0], 64, 81)  # 4 blocks, peak 9: 5 to grow
    add(state, 1, 48, 49)  # peak 6 of 9
    add(state, 2, 48, 49)  # a reserve of 6 would leave 2 for the head
    assert gpu(state).prefill_gpu == [1]
    assert ids(cpu(state).rows) == [0]


def test_a15_only_a_prompt_above_the_hard_limit_is_chunked() -> None:
    state = make(gpu=64, host=64, soft=50, hard=100)
    long = add(state, 0, 250, 4)
    add(state, 1, 16)
    first = gpu(state)
    assert [(r.start, r.num_tokens, r.sample) for r in first.rows] == [(0, 100, False)]
    assert len(long.blocks) == 16, "all its blocks are reserved at admission"
    assert ids(state.waiting) == [0, 1], "it stays at the head"
    assert [(r.start, r.num_tokens) for r in gpu(state).rows] == [(100, 100)]
    last = gpu(state)
    assert [(r.start, r.num_tokens, r.sample) for r in last.rows] == [(200, 50, True)]
    assert long.num_output == 1 and ids(state.gpu_running) == [0]


# A.1.6 Use residual HBM for additional swap-in


def test_a16_hbm_left_after_the_prompts_takes_in_the_ready_prefix() -> None:
    state = make(gpu=16, host=64)
    fill_host(state, [0, 1], 32, 33)
    add(state, 2, 64, 33)
    step = gpu(state)
    assert step.prefill_gpu == [2] and step.swap_in == [0, 1]


def test_a16_the_prefix_ends_at_the_first_unready_request() -> None:
    state = make(gpu=8, host=64, gpu_rows=4)
    add(state, 0, 32, 33)
    add(state, 1, 32, 33)
    gpu(state)
    fill_host(state, [2], 32, 17)
    state.cpu_waiting[0].pins += 1  # as if a copy were outstanding
    step = state.schedule_gpu()
    assert step is not None and step.swap_in == []
    state.cpu_waiting[0].pins -= 1


def test_a16_running_requests_are_marked_when_cpu_waiting_was_empty() -> None:
    state = make(gpu=16, host=64)
    fill_host(state, [0, 1], 32, 33)
    shut = state.gpu_pool.allocate(state.gpu_pool.num_free)
    running = state.schedule_cpu()
    assert running is not None
    state.gpu_pool.free(shut)
    add(state, 2, 16, 4)
    step = gpu(state)
    assert step.marked == [0, 1] and step.swap_in == []
    assert all(r.owner is Owner.CPU for r in state.marked), "a mark changes no ownership"
    state.apply_cpu(running, ())
    assert state.schedule_cpu() is None, "marked requests yield"
    assert ids(state.cpu_waiting) == [0, 1] and state.cpu_running == []
    assert gpu(state).swap_in == [0, 1] and state.marked == []


def test_a16_a_mark_that_cannot_be_honoured_is_withdrawn_and_the_cpu_goes_on() -> None:
    state = make(gpu=6, host=64)
    fill_host(state, [0], 32, 33)  # peak 4
    running = state.schedule_cpu()
    assert running is not None
    add(state, 1, 16, 4)
    assert gpu(state).marked == [0]
    state.apply_cpu(running, ())
    assert state.schedule_cpu() is None and ids(state.cpu_waiting) == [0]
    held = state.gpu_pool.allocate(state.gpu_pool.num_free)  # as if others had taken the room
    step = state.schedule_gpu()
    assert step is not None and step.swap_in == [] and state.marked == []
    state.gpu_pool.free(held)
    assert ids(cpu(state).rows) == [0]


def test_a16_a_yielded_request_behind_a_head_that_does_not_fit_goes_back_to_the_cpu() -> None:
    state = make(gpu=8, host=64)
    fill_host(state, [0, 1], 96, 49)  # peak 9: never fits
    fill_host(state, [2], 32, 17)
    state.cpu_waiting[2].marked = True
    state.marked.append(state.cpu_waiting[2])
    decision = gpu_round(state.view())
    assert decision.swap_in == [] and ids(decision.withdraw) == [2]


def test_a16_marks_keep_prompts_out_of_their_hbm() -> None:
    state = make(gpu=8, host=64)
    fill_host(state, [0], 32, 65)  # peak 6
    running = state.schedule_cpu()
    add(state, 1, 16, 1)
    assert gpu(state).marked == [0]
    add(state, 2, 48, 2)  # 3 blocks: would fit in 8, not beside the mark's 6
    step = gpu(state)
    assert step.prefill_gpu == [] and step.prefill_cpu == [2]
    assert running is not None


# A.1.7 Commit migrations and execute one GPU batch


def test_a17_a_swapped_in_request_decodes_in_the_round_that_brings_it() -> None:
    state = make(gpu=16, host=64)
    request_id = 0
    fill_host(state, [request_id], 40)
    step = gpu(state)
    row, swap = step.rows[0], step.transfers[0]
    assert (row.start, row.context_len) == (40, 41)
    assert row.blocks[: len(swap.dst_blocks)] == swap.dst_blocks
    assert state.requests[request_id].num_output == 2


def test_a17_an_empty_state_has_no_round() -> None:
    state = make()
    assert state.schedule_gpu() is None and state.schedule_cpu() is None and state.idle
