"""What every part of the runtime means by a request. Knows no policy, device or
token text.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from dualpace.block import BLOCK_TOKENS


class Owner(IntEnum):
    """The one engine that may schedule a request; its KV blocks, if any, lie in that engine's
    pool.
    """

    GPU = 0
    CPU = 1


ENGINES = ("gpu", "cpu")
"""Their names, by `Owner`."""


class Phase(IntEnum):
    """Where a request is in its life."""

    WAITING = 0  # no KV, or the first chunks of a prompt that is prefilled over several rounds
    DECODING = 1  # its whole context is stored, or the round that stores it has been committed
    ENDED = 2  # finished or cancelled; blocks may linger until rounds and copies in flight let go


class RowKind(IntEnum):
    """What a row of a step computes, and where its KV goes."""

    DECODE = 0  # in HBM by a GPU step, on the host by a CPU step
    PREFILL_GPU = 1
    PREFILL_CPU = 2
    HOST_FIRST = 3  # host-resident decodes in lockstep with a GPU step (neo): sub-batch 0
    HOST_SECOND = 4  # and 1


class TransferKind(IntEnum):
    """Which way a request's KV moves."""

    SWAP_OUT = 0
    SWAP_IN = 1
    PREFILL_CPU = 2  # layer-wise copies of a row; it has no source blocks


@dataclass(slots=True, eq=False)
class Request:
    """One request as the schedulers see it: lengths and places, no token contents.

    The caller sets the first group and never writes the rest, which belongs to `schedule.State`.

    After a prefill of n tokens the KV holds n tokens and one output token has been sampled whose
    K/V is not stored yet; a decode step stores that one and samples the next. So a decoding
    request has `kv_len == prompt_len + num_output + in_flight - 1`.
    """

    id: int
    prompt_len: int
    max_tokens: int  # output tokens at most, already clipped to the context limit
    arrival_s: float = 0.0
    needs_last_token: bool = False  # sampling needs the token before on the host (penalties)

    order: int = -1  # place in arrival order, given by State.add
    owner: Owner = Owner.GPU
    phase: Phase = Phase.WAITING
    num_output: int = 0  # output tokens of applied rounds
    in_flight: int = 0  # output tokens of rounds committed and not yet applied
    kv_len: int = 0  # tokens whose K/V is stored once every committed round has run
    blocks: list[int] = field(default_factory=list)  # only grows while the request stays in a pool
    estimated_output: int = 0  # output tokens expected in all, never below what it will surely have
    peak_blocks: int = 0  # finish peak in blocks: the paper's b-hat
    pins: int = 0  # copies, and chunks that sample nothing, in flight on `blocks`
    marked: bool = False  # chosen for a later swap-in
    num_preemptions: int = 0
    losses: int = 0  # of workers by their own fault, with this request in their rounds
    probation: int = 0  # tokens that it has to gain alone before it joins others again

    @property
    def ready(self) -> bool:
        """No round or copy in flight touches its KV. Gates decoding of a request in CPU waiting."""
        return not (self.in_flight or self.pins)

    @property
    def prefill_len(self) -> int:
        """Tokens that a prefill computes: the prompt and, on a recompute, all outputs so far."""
        return self.prompt_len + self.num_output

    @property
    def next_growth(self) -> int:
        """Blocks to allocate before its next decode step: 0 or 1."""
        return 1 if self.kv_len // BLOCK_TOKENS >= len(self.blocks) else 0

    @property
    def finish_growth(self) -> int:
        """Blocks it may still need before it ends: one term of Equation 3."""
        return self.peak_blocks - len(self.blocks)
