"""Every moved block is compared with what it was, and one that was changed on its way is named."""

import pytest
import torch

from dualpace.runtime import messages as m
from dualpace.runtime.types import RowKind, TransferKind
from dualpace.runtime.worker.copies import CopyEngine
from dualpace.runtime.worker.move_checks import sums, sums_of_tokens
from tests.runtime.worker.device_fake import device_rig
from tests.runtime.worker.rig import Rig
from tests.runtime.worker.swapped_case import run_swapped

CHECKED = "kv.check_moves=true"


@pytest.fixture(params=["stand-in", "device"])
def rig(make_rig, request, monkeypatch):
    if request.param == "device":
        device_rig(monkeypatch)
    return make_rig(CHECKED)


def swap(number, kind, talk, rig):
    pool = "host" if kind == TransferKind.SWAP_OUT else "gpu"
    source, talk.blocks = talk.blocks, rig.take(pool, len(talk.blocks))
    return (number, kind, source, list(talk.blocks))


def checked(rig, blocks):
    found = rig.gpu.expect(m.MovesChecked)
    assert found.blocks == blocks
    return found


def test_a_number_changes_with_each_word():
    pool = torch.randn(6, 3, 2, 2, 16, 8)
    before = sums(pool, [1, 4])
    assert before.shape == (2, 3)
    assert torch.equal(before, sums(pool.clone(), [1, 4]))
    for place in ((1, 0, 0, 0, 0, 0), (1, 0, 1, 1, 15, 7)):
        word = pool[place].item()
        pool[place] = word + 1e-3
        assert (sums(pool, [1, 4]) != before).nonzero().tolist() == [[0, 0]]
        pool[place] = word
    swapped = pool.clone()
    swapped[1, 0, 0, 0, [0, 1]] = pool[1, 0, 0, 0, [1, 0]]
    assert (sums(swapped, [1, 4]) != before).any(), "the same words elsewhere"
    many = list(range(6)) * 8
    assert torch.equal(sums(pool, many), sums(pool, range(6)).repeat(8, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_have_the_number_of_the_blocks_they_lie_in(dtype):
    k, v = torch.randn(2, 21, 2, 8).to(dtype)
    pool = torch.randn(4, 1, 2, 2, 16, 8).to(dtype)
    for token in range(21):
        block, offset = (3, 1)[token // 16], token % 16
        pool[block, 0, 0, :, offset], pool[block, 0, 1, :, offset] = k[token], v[token]
    assert torch.equal(sums_of_tokens(k, v), sums(pool, [3, 1], 5))
    assert not torch.equal(sums_of_tokens(k, v), sums(pool, [3, 1]))


def test_every_way_of_a_block_is_checked(rig, talks, reference):
    """And its report follows; decodes go on in the same round into a block that came in."""
    a, b, c = talks(20, 37, 9)
    to_host = rig.prefill(b, RowKind.PREFILL_CPU, transfer_id=1)
    rig.gpu_step([rig.prefill(a), to_host, rig.prefill(c)])
    assert checked(rig, 3).difference == ""
    rig.transfer_done(1)
    rig.gpu_step([rig.decode(c)], [swap(2, TransferKind.SWAP_OUT, a, rig)])
    assert checked(rig, 2).difference == ""
    rig.transfer_done(2)
    rig.cpu_step([a, b])
    for talk in (a, b):
        rig.gpu_step([rig.decode(c), rig.decode(talk)], [swap(3, TransferKind.SWAP_IN, talk, rig)])
        assert checked(rig, len(talk.blocks)).difference == ""
        rig.transfer_done(3)
    assert reference.agrees(a, b, c)


def test_a_batch_is_told_the_same_bits_after_one_of_it_has_been_away(rig, talks):
    run_swapped(rig, talks)


class Meddlers(CopyEngine):
    """Somebody else writes, before or after each copy."""

    before = after = staticmethod(lambda: None)

    def dispatch(self, job):
        copy = job.copy

        def run():
            self.before()
            copy()
            self.after()

        job.copy = run
        super().dispatch(job)


@pytest.fixture
def meddled(make_plan):
    rig = Rig(make_plan(CHECKED), Meddlers, True)
    yield rig
    rig.close()


@pytest.mark.parametrize("kind", TransferKind)
def test_a_block_that_somebody_else_writes_to_is_named(meddled, talks, kind):
    """On the host, where it comes from or where it goes to."""
    rig = meddled
    (a,) = talks(20)
    layer = rig.cpu_worker._layers[3].view(torch.int32)
    if kind == TransferKind.PREFILL_CPU:
        a.blocks = rig.take("host", 2)
    else:
        where = RowKind.PREFILL_CPU if kind == TransferKind.SWAP_IN else RowKind.PREFILL_GPU
        rig.gpu_step([rig.prefill(a, where, transfer_id=1)])
        if kind == TransferKind.SWAP_IN:
            assert checked(rig, 2).difference == ""
    source = list(a.blocks)
    move = swap(7, kind, a, rig) if kind != TransferKind.PREFILL_CPU else None
    on_host = source if kind == TransferKind.SWAP_IN else a.blocks

    def write():
        layer[on_host[1], 1, 0, 2, 5] = 12345

    if kind == TransferKind.SWAP_IN:
        rig.copies.before = write
    else:
        rig.copies.after = write
    if move is None:
        rig.send_gpu([rig.prefill(a, kind, transfer_id=7)])
    else:
        rig.send_gpu([], [move])
    found = checked(rig, 2)
    assert found.transfer_id == 7
    came = "" if move is None else f" from block {source[1]}"
    assert found.difference.startswith(f"layer 3 of block {a.blocks[1]} is not what left{came} by")
