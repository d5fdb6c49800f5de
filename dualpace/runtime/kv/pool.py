"""Physical block ids of one KV pool. Knows nothing of requests, bytes or devices."""

from collections.abc import Sequence


class BlockPool:
    """Hands out block ids 1..num_blocks-1; block 0 is scratch for padding rows and never allocated.

    `num_blocks` is the size of the memory in blocks, scratch included. The free list is a stack: a
    freed block is the next one given away, while its memory is warm.
    """

    __slots__ = ("_free", "_taken", "capacity")

    def __init__(self, num_blocks: int) -> None:
        self.capacity = max(num_blocks - 1, 0)
        self._free = list(range(self.capacity, 0, -1))
        self._taken = bytearray(self.capacity + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks. The caller has checked that they are free."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        if count == 0:
            return []
        blocks = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block in blocks:
            self._taken[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Gives blocks back, the last one first to be taken again."""
        for block in blocks:
            assert self._taken[block], f"block {block} is freed but was not taken"
            self._taken[block] = 0
        self._free.extend(blocks)

    def check(self, held: Sequence[int]) -> None:
        """Proves that `held`, the blocks of all holders together, and the free list make the
        pool.
        """
        assert len(set(held)) == len(held), "a block has two holders"
        assert len(held) == self.num_used, f"{len(held)} blocks held, {self.num_used} used"
        assert all(self._taken[block] for block in held), "a held block is not taken"
        assert sum(self._taken) == self.num_used, "the free list and the marks differ"
        assert not self._taken[0] and 0 not in self._free, "scratch block 0 was given away"
