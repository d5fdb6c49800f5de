"""KV on its way: what may happen before a copy's event has fired, and what may not."""

import pytest

from dualpace.runtime import messages as m
from dualpace.runtime.types import RowKind, TransferKind

LAYERS = 5


def swap(number, kind, talk, rig):
    """A migration of the whole request; it then lives in its new blocks."""
    pool = "host" if kind == TransferKind.SWAP_OUT else "gpu"
    source, talk.blocks = talk.blocks, rig.take(pool, len(talk.blocks))
    return (number, kind, source, list(talk.blocks))


def test_prefill_to_cpu_then_cpu_decode_equals_the_dense_model(rig, talks, reference):
    lengths = talks(5, 16, 37, 48)
    rows = [rig.prefill(t, RowKind.PREFILL_CPU, transfer_id=i) for i, t in enumerate(lengths)]
    rig.gpu_step(rows)
    rig.transfer_done(0, 1, 2, 3)
    for _ in range(20):
        rig.cpu_step(lengths)
    assert reference.agrees(*lengths)


@pytest.mark.parametrize("copies", ["good", "wild"])
def test_swaps_in_mid_generation_change_no_token(make_rig, talks, reference, copies):
    rig = make_rig(copies=copies)
    a, b, c = talks(15, 31, 40)
    rig.gpu_step([rig.prefill(a), rig.prefill(b)])
    for number in range(0, 12, 3):
        rig.gpu_step([rig.decode(a), rig.decode(b)])
        out = swap(number, TransferKind.SWAP_OUT, a, rig)
        rows = [rig.decode(b)]
        if number == 3:
            rows.append(rig.prefill(c, RowKind.PREFILL_CPU, transfer_id=100))
        rig.gpu_step(rows, [out])
        rig.transfer_done(number, *([100] if number == 3 else []))
        for _ in range(3):
            rig.cpu_step([a] if number < 3 else [a, c])
        back = swap(number + 1, TransferKind.SWAP_IN, a, rig)
        rig.gpu_step([rig.decode(a), rig.decode(b)], [back])
        rig.transfer_done(number + 1)
    assert len(a.output) == 1 + 4 * 5
    assert reference.agrees(a, b, c)


def test_one_round_swaps_both_ways(rig, talks, reference):
    a, b = talks(20, 25)
    rig.gpu_step([rig.prefill(a), rig.prefill(b, RowKind.PREFILL_CPU, transfer_id=1)])
    rig.transfer_done(1)
    rig.gpu_step(
        [rig.decode(b)],
        [swap(2, TransferKind.SWAP_OUT, a, rig), swap(3, TransferKind.SWAP_IN, b, rig)],
    )
    rig.transfer_done(2, 3)
    rig.cpu_step([a])
    rig.gpu_step([rig.decode(b)])
    assert reference.agrees(a, b)


def test_a_transfer_is_reported_when_every_layer_has_arrived(make_rig, talks, reference):
    rig = make_rig(copies="held")
    (a,) = talks(20)
    step = rig.send_gpu([row := rig.prefill(a, RowKind.PREFILL_CPU, transfer_id=7)])
    rig.copies.wait_held(2)
    rig.copies.release(2)
    rig.copies.wait_held(2)
    rig.copies.release(2)
    rig.copies.wait_held(1)
    rig.gpu_done(step, [row])  # the first token goes out at once
    assert rig.gpu.silent(m.TransfersDone)
    rig.copies.release()
    rig.transfer_done(7)
    rig.cpu_step([a])
    assert reference.agrees(a)


def test_the_last_layer_to_arrive_need_not_be_the_last_one_issued(make_rig, talks, reference):
    rig = make_rig(copies="held")
    a, b = talks(20, 9)
    rows = [rig.prefill(t, RowKind.PREFILL_CPU, transfer_id=i) for i, t in enumerate((a, b))]
    step = rig.send_gpu(rows)
    for _ in range(2):
        rig.copies.wait_held(4)
        rig.copies.release(4, last_first=True)
    rig.copies.wait_held(2)
    rig.gpu_done(step, rows)
    rig.copies.release(1, last_first=True)  # b's last layer
    rig.transfer_done(1)
    assert rig.gpu.silent(m.TransfersDone)
    rig.copies.release()
    rig.transfer_done(0)
    rig.cpu_step([a, b])
    assert reference.agrees(a, b)


def test_a_staging_buffer_is_not_refilled_before_its_copies_have_ended(make_rig, talks, reference):
    rig = make_rig(copies="held")
    (a,) = talks(40)
    step = rig.send_gpu([row := rig.prefill(a, RowKind.PREFILL_CPU, transfer_id=1)])
    rig.copies.wait_held(2)
    assert rig.gpu.silent(m.StepDone)
    assert len(rig.copies.held) == 2  # the third layer waits for the first one's buffer
    rig.copies.release()
    rig.gpu_done(step, [row])
    rig.transfer_done(1)
    rig.cpu_step([a])
    assert reference.agrees(a)


def test_staging_is_drained_across_batches(make_rig, talks, reference):
    rig = make_rig(copies="held")
    a, b = talks(18, 22)
    step = rig.send_gpu([first := rig.prefill(a, RowKind.PREFILL_CPU, transfer_id=1)])
    for _ in range(LAYERS - 2):
        rig.copies.wait_held(2)
        rig.copies.release(1)
    rig.gpu_done(step, [first])
    rig.copies.wait_held(2)  # the last two layers still read both buffers
    step = rig.send_gpu([second := rig.prefill(b, RowKind.PREFILL_CPU, transfer_id=2)])
    assert rig.gpu.silent(m.StepDone)
    assert len(rig.copies.held) == 2
    rig.copies.release()
    rig.gpu_done(step, [second])
    rig.transfer_done(1, 2)
    rig.cpu_step([a, b])
    assert reference.agrees(a, b)


def test_a_victims_block_is_not_reused_before_its_copy_has_ended(make_rig, talks, reference):
    rig = make_rig(copies="held")
    victim, other = talks(16, 16)
    rig.gpu_step([rig.prefill(victim), rig.prefill(other)])
    source = list(victim.blocks)
    out = swap(1, TransferKind.SWAP_OUT, victim, rig)
    other.blocks += source  # this round's own decode takes it over
    step = rig.send_gpu([row := rig.decode(other)], [out])
    rig.copies.wait_held(1)
    assert rig.gpu.silent(m.StepDone)
    rig.copies.release()
    rig.gpu_done(step, [row])
    rig.transfer_done(1)
    rig.cpu_step([victim])
    rig.gpu_step([rig.decode(other)])
    assert reference.agrees(victim, other)


def test_a_row_is_not_decoded_before_its_swap_in_has_ended(make_rig, talks, reference):
    rig = make_rig(copies="held")
    (a,) = talks(30)
    rig.copies.holding = False
    rig.gpu_step([rig.prefill(a, RowKind.PREFILL_CPU, transfer_id=1)])
    rig.transfer_done(1)
    rig.copies.holding = True
    # The swap-in's round has no rows, and the next one decodes before anything is reported.
    rig.gpu_step([], [swap(2, TransferKind.SWAP_IN, a, rig)])
    assert rig.gpu.silent(m.TransfersDone)
    step = rig.send_gpu([row := rig.decode(a)])
    assert rig.gpu.silent(m.StepDone)
    rig.copies.release()
    rig.gpu_done(step, [row])
    rig.transfer_done(2)
    assert reference.agrees(a)


def test_a_failed_copy_ends_the_worker(make_rig, talks):
    rig = make_rig()
    (a,) = talks(16)
    rig.gpu_step([rig.prefill(a)])
    rig.send_gpu([], [(1, TransferKind.SWAP_OUT, a.blocks, [10**6])])
    with pytest.raises(IndexError):
        rig.gpu.expect(m.TransfersDone)
