"""Block ids: each given once, scratch never."""

import pytest

from dualpace.runtime.kv import BlockPool


def test_every_block_but_scratch_can_be_taken_once() -> None:
    pool = BlockPool(8)
    assert pool.capacity == 7
    taken = pool.allocate(3) + pool.allocate(4)
    assert sorted(taken) == list(range(1, 8))
    assert (pool.num_free, pool.num_used) == (0, 7)
    pool.check(taken)


def test_what_is_freed_last_is_taken_first() -> None:
    pool = BlockPool(8)
    first = pool.allocate(4)
    pool.free(first[1:3])
    assert pool.allocate(1) == [first[2]]


@pytest.mark.parametrize("size", [0, 1])
def test_a_pool_may_be_empty(size: int) -> None:
    pool = BlockPool(size)
    assert pool.capacity == pool.num_free == 0
    assert pool.allocate(0) == []
    pool.check([])


def test_wrong_use_is_caught() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="wanted"):
        pool.allocate(2)
    pool.free(blocks[:1])
    with pytest.raises(AssertionError, match="not taken"):
        pool.free(blocks[:1])


def test_check_finds_a_leak_and_a_second_holder() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 blocks held, 2 used"):
        pool.check(blocks[:1])
    with pytest.raises(AssertionError, match="two holders"):
        pool.check([blocks[0], blocks[0]])
