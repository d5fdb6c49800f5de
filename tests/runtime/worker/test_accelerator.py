"""Main batches of the GPU worker against the model without pools or batches."""

import numpy as np
import pytest
import torch

from dualpace.runtime.types import RowKind


def test_mixed_batches_equal_the_dense_model(rig, talks, reference):
    a, b, c = talks(5, 16, 37)
    rig.gpu_step([rig.prefill(a)])
    rig.gpu_step([rig.decode(a), rig.prefill(b)])
    rig.gpu_step([rig.prefill(c), rig.decode(b), rig.decode(a)])
    for _ in range(20):
        rig.gpu_step([rig.decode(t) for t in (c, a, b)])
    assert len(c.output) == 21
    assert reference.agrees(a, b, c)


def test_results_line_up_with_rows_in_any_order(rig, talks, reference):
    a, b, c, d = talks(9, 20, 33, 7)
    rig.gpu_step([rig.prefill(a), rig.prefill(b)])
    rows = [
        rig.prefill(c, RowKind.PREFILL_CPU, transfer_id=1),
        rig.decode(b),
        rig.prefill(d),
        rig.decode(a),
    ]
    rig.gpu_step(rows)
    assert reference.agrees(a, b, c, d)


def test_pieces_of_a_prompt_equal_the_whole(rig, talks, reference):
    a, b = talks(45, 6)
    rig.gpu_step([rig.prefill(b)])
    done = rig.gpu_step([rig.piece(a, 0, 21), rig.decode(b)])
    assert done.tokens[0] == -1  # not its last piece
    rig.gpu_step([rig.decode(b), rig.piece(a, 21, 32)])
    rig.gpu_step([rig.piece(a, 32, 45), rig.decode(b)])
    for _ in range(5):
        rig.gpu_step([rig.decode(a), rig.decode(b)])
    assert len(a.output) == 6
    assert reference.agrees(a, b)


def test_a_recomputed_request_goes_on_as_before(rig, talks, reference):
    (a,) = talks(14)
    rig.gpu_step([rig.prefill(a)])
    for _ in range(4):
        rig.gpu_step([rig.decode(a)])
    a.blocks.clear()  # preempted
    rig.gpu_step([rig.prefill(a)])
    rig.gpu_step([rig.decode(a)])
    assert reference.agrees(a)


def test_a_step_scheduled_ahead_takes_the_token_in_flight(rig, talks, reference):
    a, b, c = talks(16, 30, 8)
    rig.gpu_step([rig.prefill(a), rig.prefill(b), rig.prefill(c)])
    for _ in range(3):
        first = [rig.decode(t) for t in (a, b, c)]
        step = rig.send_gpu(first)
        ahead = [rig.decode_ahead(t) for t in (c, a)]  # b waits, and rows move
        next_step = rig.send_gpu(ahead)
        rig.gpu_done(step, first)
        rig.gpu_done(next_step, ahead)
        rig.gpu_step([rig.decode(b)])
    assert len(b.output) == 7
    assert reference.agrees(a, b, c)


def test_a_prompt_after_its_first_token_in_flight(rig, talks, reference):
    (a,) = talks(16)
    first = [rig.prefill(a)]
    step, ahead = rig.send_gpu(first), [rig.decode_ahead(a)]
    next_step = rig.send_gpu(ahead)
    rig.gpu_done(step, first)
    rig.gpu_done(next_step, ahead)
    assert len(a.output) == 2
    assert reference.agrees(a)


def test_sampling_depends_on_the_uniform_number_of_each_row(rig, talks, reference):
    warm = talks(11, 18, temperature=1.5)
    rig.gpu_step([rig.prefill(t) for t in warm])
    for _ in range(6):
        rig.gpu_step([rig.decode(t) for t in warm[::-1]])
    assert reference.agrees(*warm)
    for talk in warm:
        talk.temperature = 0.0
    assert any(t.output != reference.output(t) for t in warm)  # it was not greedy


def test_steps_of_one_worker_do_not_overlap(rig, talks):
    (a,) = talks(12)
    first = [rig.prefill(a)]
    steps = [rig.send_gpu(first), rig.send_gpu([rig.decode_ahead(a)])]
    one, two = (rig.gpu_done(step) for step in steps)
    assert one.started_s + one.duration_s <= two.started_s


def test_a_batch_without_rows_is_done_at_once(rig):
    assert len(rig.gpu_step().tokens) == 0


def test_host_and_hbm_hold_the_same_bits(make_rig, talks):
    rig = make_rig("model.dtype=bf16")
    here, there = talks(37, 37)
    there.tokens = list(here.tokens)
    rig.gpu_step([rig.prefill(here)])
    rig.gpu_step([rig.prefill(there, RowKind.PREFILL_CPU, transfer_id=9)])
    rig.transfer_done(9)
    hbm = rig.gpu_worker._rounds._attention._layers
    host = rig.cpu_worker._layers
    for layer in range(len(hbm)):
        mine = hbm[layer][here.blocks].view(torch.int16).transpose(2, 3).numpy()
        other = host[layer][there.blocks].view(torch.int16).transpose(2, 3).numpy()
        # [blocks, 2, 16, kv_heads, d]: the first two blocks, and five tokens of the third
        assert np.array_equal(mine[:2], other[:2])
        assert np.array_equal(mine[2, :, :5], other[2, :, :5])
        assert mine[:2].any()


@pytest.mark.parametrize("dtype", ["bf16", "float32"])
def test_nothing_is_written_outside_a_requests_blocks(make_rig, talks, dtype):
    rig = make_rig(f"model.dtype={dtype}")
    (a,) = talks(20)
    rig.gpu_step([rig.prefill(a)])
    rig.gpu_step([rig.decode(a)])
    others = [b for b in range(1, 40) if b not in a.blocks]
    assert not any(layer[others].any() for layer in rig.gpu_worker._rounds._attention._layers)
