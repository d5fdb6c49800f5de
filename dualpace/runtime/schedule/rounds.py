"""What a round decides, and what it becomes once committed: decisions name requests, steps name
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dualpace.runtime.schedule.envelope import HostEnvelope
from dualpace.runtime.types import Request, RowKind, TransferKind


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt, or a chunk of one, admitted to a round."""

    request: Request
    num_tokens: int  # computed in this round
    estimated_output: int  # what its finish peak was judged by


@dataclass(slots=True)
class GpuRound:
    """A policy's decision for the GPU engine: nothing has happened yet."""

    decode: list[Request] = field(default_factory=list)  # GPU-resident, in queue order
    swap_out: list[Request] = field(default_factory=list)
    swap_in: list[Request] = field(default_factory=list)  # they decode in this round too
    prefill_gpu: list[Prefill] = field(default_factory=list)
    prefill_cpu: list[Prefill] = field(default_factory=list)
    mark: list[Request] = field(default_factory=list)
    withdraw: list[Request] = field(default_factory=list)  # marks given up
    preempt: list[Request] = field(default_factory=list)  # dropped and recomputed later
    host: tuple[list[Request], list[Request]] = field(default_factory=lambda: ([], []))
    """Host-resident decodes of sub-batch 0 and 1 that run in lockstep with the GPU (neo)."""

    @property
    def exclusive(self) -> bool:
        """It must not be scheduled ahead: it moves KV between tiers, or recomputes."""
        return bool(
            self.swap_out
            or self.swap_in
            or self.prefill_cpu
            or self.preempt
            or any(p.request.num_output for p in self.prefill_gpu)
        )

    @property
    def has_host_rows(self) -> bool:
        return any(self.host)

    def may_follow(self, flying: GpuStep) -> bool:
        """Whether it may be scheduled while that one is in flight. Of host rows only one round is:
        their tokens must be known, and they are decoded one after another."""
        return not (self.exclusive or (self.has_host_rows and flying.has_host_rows))

    @property
    def decodes_only(self) -> bool:
        """It changes nothing that the CPU engine decides by."""
        changes = self.exclusive or self.has_host_rows
        return not (changes or self.prefill_gpu or self.mark or self.withdraw)


@dataclass(slots=True)
class CpuRound:
    """A policy's decision for the CPU engine."""

    decode: list[Request] = field(default_factory=list)  # the batch, and the next running queue
    displaced: list[Request] = field(default_factory=list)  # leave running for the front of waiting
    admitted: int = 0  # how many of `decode`, its last ones, come from waiting
    preempt: list[Request] = field(default_factory=list)  # of waiting: dropped, recomputed later
    may_assist: bool = True  # the GPU may be asked for dense stages, if the batch's size says so

    @property
    def decodes_only(self) -> bool:
        """It changes nothing that the GPU engine decides by."""
        return not (self.displaced or self.admitted or self.preempt)


@dataclass(slots=True)
class Row:
    """One request's part of a step."""

    request: Request
    kind: RowKind
    start: int  # position of the first token computed now
    num_tokens: int  # 1 for a decode
    blocks: list[int]  # this row's are the first ceil(context_len / 16); it may grow later
    sample: bool = True  # False for a chunk that is not the prompt's last
    transfer_id: int = -1  # of a PREFILL_CPU's layer-wise copies

    @property
    def context_len(self) -> int:
        """KV tokens after this step."""
        return self.start + self.num_tokens


@dataclass(slots=True)
class Transfer:
    """Copies of one request's KV between the pools, block `src_blocks[i]` to `dst_blocks[i]`."""

    id: int
    request: Request
    kind: TransferKind
    src_blocks: list[int]
    dst_blocks: list[int]
    held: list[int]  # source blocks to free at the report, less those its round's decodes took


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state a step runs with, right after its commit: the counts of the round log."""

    gpu_capacity: int
    gpu_used: int
    host: HostEnvelope
    waiting: int
    gpu_running: int
    cpu_waiting: int
    cpu_running: int


@dataclass(slots=True)
class GpuStep:
    """A committed GPU round in physical terms: start `transfers`, then run `rows` as one batch.

    The batch waits for the swaps; only it may use blocks that a swap-out vacates. `rows` holds
    decodes, swapped-in ones last, then prefills to the GPU, then to the CPU. Either list may be
    empty.
    """

    number: int
    rows: list[Row]
    transfers: list[Transfer]  # swaps; Prefill-to-CPU copies are named by their row
    snapshot: Snapshot
    prefill_gpu: list[int]
    prefill_cpu: list[int]
    swap_out: list[int]
    swap_in: list[int]
    marked: list[int]
    preempted: list[int]  # since the last step, by this engine's rounds or by a lost worker
    host_rows: tuple[list[Row], list[Row]] = field(default_factory=lambda: ([], []))
    exclusive: bool = False
    due: list[Request] = field(default_factory=list)  # their token reaches their estimate

    @property
    def prompt_rows(self) -> list[Row]:
        """Prompts and chunks of one: the last ones of `rows`."""
        return self.rows[len(self.rows) - len(self.prefill_gpu) - len(self.prefill_cpu) :]

    @property
    def has_host_rows(self) -> bool:
        """It runs in lockstep with the CPU worker (neo)."""
        return any(self.host_rows)

    @property
    def all_rows(self) -> list[Row]:
        """In the order in which a worker's message names them."""
        return [*self.rows, *self.host_rows[0], *self.host_rows[1]]


@dataclass(slots=True)
class CpuStep:
    """A committed CPU round: one decode row a request, host blocks."""

    number: int
    rows: list[Row]
    snapshot: Snapshot
    preempted: list[int]
    may_assist: bool = True
    due: list[Request] = field(default_factory=list)  # their token reaches their estimate

    @property
    def all_rows(self) -> list[Row]:
        return self.rows


@dataclass(slots=True)
class Applied:
    """What applying a step has done."""

    step: GpuStep | CpuStep
    sampled: list[Request]  # gained one token, in row order
    finished: list[Request]  # of those, the ones that ended
    dropped: list[Request]  # had ended before: their token is void
    batch: list[int]  # ids that ran and were not dropped, chunks included
