"""A machine that keeps, for every token slot of both pools, whose token at which position lies
there.

It runs steps and copies as the workers may: a batch after its swaps, reports at any later time,
and fails when a row reads a slot that does not hold the token it needs.
"""

from dataclasses import dataclass, field

from dualpace.block import BLOCK_TOKENS
from dualpace.runtime.schedule import CpuStep, GpuStep, Row, RowKind, State, TransferKind
from dualpace.runtime.types import Owner

BASE = 1_000_000  # token p of request r is r * BASE + p
GARBAGE = [-1] * BLOCK_TOKENS


@dataclass
class Copy:
    id: int
    request: int
    is_prefill: bool
    done: bool = False


@dataclass
class FakeDevice:
    """Drives nothing: the test says what happens next."""

    state: State
    steps: list[GpuStep] = field(default_factory=list)
    executed: int = 0  # of `steps`
    cpu_step: CpuStep | None = None
    copies: dict[int, Copy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pools = (self.state.gpu_pool, self.state.host_pool)
        self.memory = [[list(GARBAGE) for _ in range(p.capacity + 1)] for p in pools]

    def submit(self, step: GpuStep) -> None:
        """Takes a step and does its swaps, in any case before its batch; reports come later."""
        self.steps.append(step)
        assert not (step.transfers and len(self.steps) > 1), "a swap was scheduled ahead"
        for transfer in step.transfers:
            assert len(transfer.src_blocks) == len(transfer.dst_blocks)
            out = transfer.kind is TransferKind.SWAP_OUT
            source, target = self.memory[not out], self.memory[out]
            for a, b in zip(transfer.src_blocks, transfer.dst_blocks, strict=True):
                target[b][:] = source[a]
            self.copies[transfer.id] = Copy(transfer.id, transfer.request.id, False, done=True)
        for row in step.rows:
            if row.kind is RowKind.PREFILL_CPU:
                self.copies[row.transfer_id] = Copy(row.transfer_id, row.request.id, True)

    def execute(self) -> None:
        """Runs the oldest step that has not run."""
        step = self.steps[self.executed]
        self.executed += 1
        mine = {row.transfer_id for row in step.rows}
        staged = [c for c in self.copies.values() if c.is_prefill and c.id not in mine and c.done]
        if any(row.kind is RowKind.PREFILL_CPU for row in step.rows):
            assert not staged, "staging is written before its copies are reported"
        for row in (*step.rows, *step.host_rows[0], *step.host_rows[1]):
            on_host = row.kind >= RowKind.PREFILL_CPU
            self.write(row, Owner.CPU if on_host else Owner.GPU)
            if row.kind is RowKind.PREFILL_CPU:
                self.copies[row.transfer_id].done = True

    def write(self, row: Row, tier: Owner) -> None:
        """Checks the context that the row reads, then stores its tokens."""
        memory, first = self.memory[tier], row.request.id * BASE
        for index in range(-(-row.start // BLOCK_TOKENS)):
            begin = index * BLOCK_TOKENS
            held = min(row.start - begin, BLOCK_TOKENS)
            expected = list(range(first + begin, first + begin + held))
            assert memory[row.blocks[index]][:held] == expected, f"request {row.request.id}"
        for position in range(row.start, row.context_len):
            block = memory[row.blocks[position // BLOCK_TOKENS]]
            block[position % BLOCK_TOKENS] = first + position

    def run_cpu(self) -> None:
        """The CPU iteration: may run only on host KV that no copy is still writing."""
        assert self.cpu_step is not None
        in_copy = {copy.request for copy in self.copies.values()}
        for row in self.cpu_step.rows:
            assert row.request.id not in in_copy, "a row runs before its copies are reported"
            self.write(row, Owner.CPU)

    def reportable(self) -> list[int]:
        return [copy.id for copy in self.copies.values() if copy.done]

    def report(self, ids: list[int]) -> None:
        for copy_id in ids:
            del self.copies[copy_id]
        self.state.transfer_done(ids)

    def die(self) -> None:
        """The GPU worker: HBM is garbage, and so is what its copies were writing."""
        for block in self.memory[Owner.GPU]:
            block[:] = GARBAGE
        self.steps.clear()
        self.copies.clear()
        self.executed = 0
