"""The Dense Assist handshake, both sides in one process."""

import os
from itertools import pairwise

import numpy as np
import pytest

from dualpace.runtime.assist import AssistBuffer, AssistKind, AssistLayout, AssistLostError
from dualpace.runtime.channel import eventfd
from dualpace.runtime.shared_memory import SharedRegion

LAYOUT = AssistLayout(max_rows=5, hidden=7, attention_width=9, itemsize=2, edits_bytes=8)


@pytest.fixture
def sides():
    region = SharedRegion.create("test assist", LAYOUT.nbytes)
    other = SharedRegion.attach(os.dup(region.fd))
    bell = eventfd()
    yield AssistBuffer(region, LAYOUT), AssistBuffer(other, LAYOUT), bell
    os.close(bell)


def test_parts_do_not_overlap_and_fit() -> None:
    parts = sorted(LAYOUT.offsets().values())
    assert all(a + n <= b for (a, n), (b, _) in pairwise(parts))
    assert sum(parts[-1]) <= LAYOUT.nbytes


def test_a_published_assist_is_taken_once_and_done_once(sides) -> None:
    cpu, gpu, bell = sides
    assert gpu.take() is None
    cpu.publish(AssistKind.POST_LAYER, 3, 5, bell)
    assert not cpu.is_done()
    assert gpu.take() == (AssistKind.POST_LAYER, 3, 5, 0)
    assert gpu.take() is None
    gpu.tokens[:5] = 11, 12, 13, 14, 15
    gpu.finish(0, bell)
    assert cpu.is_done()
    assert cpu.tokens.tolist() == [11, 12, 13, 14, 15]
    cpu.release()
    assert gpu.take() is None


def test_edits_are_those_of_the_batch_that_was_written_last(sides) -> None:
    cpu, gpu, _ = sides
    assert len(gpu.edits()) == 0
    for edits in (range(8), range(3), ()):
        cpu.write_edits(np.array(edits, np.uint8))
        assert gpu.edits().tolist() == list(edits)


def test_a_raised_epoch_voids_what_was_published(sides) -> None:
    cpu, gpu, bell = sides
    cpu.publish(AssistKind.POST_ATTENTION, 0, 1, bell)
    gpu.raise_epoch()
    assert gpu.take() is None
    with pytest.raises(AssistLostError):
        cpu.is_done()


def test_an_assist_of_an_old_epoch_is_forgotten_when_it_ends(sides) -> None:
    cpu, gpu, bell = sides
    cpu.publish(AssistKind.POST_ATTENTION, 0, 1, bell)
    *_, epoch = gpu.take()
    gpu.raise_epoch()
    cpu.publish(AssistKind.POST_ATTENTION, 1, 1, bell)  # the restarted CPU worker's first
    gpu.finish(epoch, bell)
    assert not cpu.is_done()
    assert gpu.take() == (AssistKind.POST_ATTENTION, 1, 1, 1)
