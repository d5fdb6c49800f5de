"""Regions: the same memory on both sides, huge pages where the kernel gives them, nothing left."""

import ctypes
import gc
import os
from pathlib import Path

import numpy as np
import pytest

from dualpace.errors import ConfigError
from dualpace.runtime import shared_memory
from dualpace.runtime.shared_memory import SharedRegion

HUGE_PAGE = 2 << 20


@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("nbytes", [5000, HUGE_PAGE, 3 * HUGE_PAGE + 4096])
def test_both_sides_see_zeroed_memory_and_each_others_writes(nbytes: int, huge: bool) -> None:
    region = SharedRegion.create("test", nbytes, huge=huge)
    other = SharedRegion.attach(os.dup(region.fd))
    assert len(region.view) == len(other.view) == nbytes
    assert not np.frombuffer(other.view, np.uint8).any()
    other.view[nbytes - 1] = 7
    assert region.view[nbytes - 1] == 7
    for side in (region, other):
        assert ctypes.addressof(ctypes.c_ubyte.from_buffer(side.view)) % HUGE_PAGE == 0
        side.close()


def test_memory_is_reserved_at_creation() -> None:
    region = SharedRegion.create("test", 4 * HUGE_PAGE, huge=True)
    assert os.fstat(region.fd).st_blocks * 512 >= 4 * HUGE_PAGE
    region.close()


def test_who_was_promised_a_region_sees_when_it_is_there() -> None:
    region = SharedRegion.promise("test", 4 * HUGE_PAGE)
    other = SharedRegion.attach(os.dup(region.fd))
    assert os.fstat(region.fd).st_blocks == 0 and not other.is_reserved
    other.view[0] = 7
    region.reserve("test", huge=True)
    assert os.fstat(region.fd).st_blocks * 512 >= 4 * HUGE_PAGE and other.is_reserved
    for side in (region, other):
        side.close()


def test_what_cannot_be_had_is_a_sentence_and_never_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "_GROWTH_S", 0.0)
    region = SharedRegion.promise("test", 4 * HUGE_PAGE)
    little = iter([1 << 40])  # at the first look; then nothing is left
    with pytest.raises(ConfigError, match=r"test needs 0\.01 GiB of memory and only 0\.00 GiB"):
        near = [(HUGE_PAGE, ())]
        region.reserve("test", lambda: next(little, 0), near=near)
    assert not region.is_reserved
    region.close()


def test_stretches_are_taken_and_the_thread_comes_back_to_its_cores() -> None:
    before, looks = os.sched_getaffinity(0), []
    near = [(1 << 20, ()), (3 << 20, [min(before)])]
    region = SharedRegion.create("test", 5 << 20, lambda: looks.append(1) or 1 << 40, near=near)
    assert os.fstat(region.fd).st_blocks * 512 >= 5 << 20
    assert os.sched_getaffinity(0) == before and len(looks) == 3
    region.close()


def test_a_region_is_unmapped_when_its_last_view_has_gone() -> None:
    region = SharedRegion.create("test of unmapping", 4096)
    array = np.frombuffer(region.view, np.uint8)
    region.close()
    del region
    gc.collect()
    assert array[0] == 0 and mapped()
    del array
    gc.collect()
    assert not mapped()


def mapped() -> bool:
    return "test of unmapping" in Path("/proc/self/maps").read_text()
