"""Every message between the processes. Field order is the wire format (`wire`).

A batch is sent row by row: row r computes `num_tokens[r]` tokens from position `starts[r]`, and
its block table is `blocks[block_offsets[r]:block_offsets[r + 1]]`, long enough for `starts[r] +
num_tokens[r]` tokens of KV. Times are seconds of `time.monotonic()`, which all processes of a
machine share.
"""

from dataclasses import dataclass, field

import numpy as np

from dualpace.runtime.wire import F32, F64, I32, I64, U8, Message

NOT_FINISHED, STOP, LENGTH = 0, 1, 2  # `Tokens.finished`
FINISH_REASONS = (None, "stop", "length")  # by those: the words of the HTTP interface
TOKEN_IN_FLIGHT = -1  # a decode row whose input is the token that the step before samples


def no_bytes() -> U8:
    return np.empty(0, np.uint8)


def no_words() -> I32:
    return np.empty(0, np.int32)


def asks_for(best: int | None) -> int:
    """How a request for log-probabilities is told: 0 for none, else 1 + the likeliest tokens that
    are wanted beside the generated one."""
    return 0 if best is None else 1 + best


# ---- engine -> GPU worker; to the CPU worker before, where it holds host rows


@dataclass(slots=True)
class GpuBatch(Message, kind=1):
    """One GPU step: copies to start, then rows to compute. Either part may be empty.

    Rows of HOST_FIRST, then those of HOST_SECOND, come last. They are void when the assist epoch
    moves on.
    """

    step: int
    epoch: int
    request_ids: I64
    kinds: U8  # `types.RowKind`
    starts: I32
    num_tokens: I32
    sample: U8  # 0 for a piece of a prompt that is not its last
    transfer_ids: I64  # of a PREFILL_CPU row, else -1
    token_ids: I32  # all rows' input tokens, one after another
    block_offsets: I32  # R + 1
    blocks: I32  # HBM blocks; host blocks for PREFILL_CPU and host rows
    temperature: F32
    top_k: I32
    top_p: F32
    uniform: F32
    migration_ids: I64
    migration_kinds: U8  # `types.TransferKind`
    migration_offsets: I32  # M + 1, into both lists
    source_blocks: I32
    target_blocks: I32
    edits: U8 = field(default_factory=no_bytes)  # `Edits`, encoded; empty: no row has any
    logprobs: U8 = field(default_factory=no_bytes)  # `asks_for` by row; empty: nobody asks


# ---- engine -> CPU worker


@dataclass(slots=True)
class CpuBatch(Message, kind=2):
    """One decode iteration over host-resident rows: row r appends at position `starts[r]`."""

    step: int
    route: int  # index into `routing.Route`
    request_ids: I64
    token_ids: I32
    starts: I32
    block_offsets: I32
    blocks: I32
    temperature: F32
    top_k: I32
    top_p: F32
    uniform: F32
    edits: U8 = field(default_factory=no_bytes)  # `Edits`, encoded; empty: no row has any
    logprobs: U8 = field(default_factory=no_bytes)  # `asks_for` by row; empty: nobody asks


@dataclass(slots=True)
class Edits(Message, kind=3):
    """What `rows` of a batch, P of them, have done to their logits (`graphs.logit_edits`).

    Travels inside batches and the assist buffer. `..._owner` says which of the P a pair of a row
    and a token belongs to; a row names no token twice in a list.
    """

    rows: I32
    min_p: F32
    presence: F32
    frequency: F32
    repetition: F32
    bias_owner: I32
    bias_token: I32
    bias: F32  # -inf forbids
    only: U8  # by row: 1 where no token is left but those with a bias
    seen_owner: I32
    seen_token: I32
    seen_count: I32  # among the output; 0: in the prompt alone
    masked: U8  # by row: 1 where it has a mask
    masks: I32  # the masks of those, as many words each: a bit a token, 1 where it may be drawn


# ---- worker -> engine


@dataclass(slots=True)
class Phase(Message, kind=10):
    """What a starting process is doing, for people and for /ready."""

    text: str


@dataclass(slots=True)
class Ready(Message, kind=11):
    """The sender can serve. `info` is a JSON object: seconds by phase, memory, kernels."""

    info: str


@dataclass(slots=True)
class Failed(Message, kind=12):
    """The sender cannot go on. `text` is for people; `user_error` is 1 where they can fix it."""

    text: str
    user_error: int


@dataclass(slots=True)
class StepDone(Message, kind=13):
    """Tokens of a batch, aligned with its rows; -1 where a row did not sample."""

    step: int
    started_s: float
    duration_s: float
    tokens: I32
    compiles_after_ready: int
    asking: I32 = field(default_factory=no_words)  # rows whose log-probabilities follow
    logprobs: I32 = field(default_factory=no_words)  # as many words each (`logprobs.num_words`)


@dataclass(slots=True)
class StepDropped(Message, kind=14):
    """A CPU iteration lost the worker that served its assist; run it again."""

    step: int


@dataclass(slots=True)
class TransfersDone(Message, kind=15):
    """Copies whose last event has fired."""

    transfer_ids: I64


@dataclass(slots=True)
class MovesChecked(Message, kind=17):
    """What a debug mode has found of copies that are about to be reported: `blocks` were compared
    with what they had been. `difference`: empty, or where `transfer_id` broke one, for people.
    """

    blocks: int
    transfer_id: int = 0
    difference: str = ""


@dataclass(slots=True)
class AssistDone(Message, kind=16):
    """One Dense Assist as the GPU worker saw it (Figure 12), and the CPU worker's wait; seconds."""

    kind_of_assist: int
    layer: int
    rows: int
    wait_s: float
    launch_s: float
    h2d_s: float
    compute_s: float
    sampling_s: float
    d2h_s: float
    finalize_s: float


# ---- server <-> engine


@dataclass(slots=True)
class Hello(Message, kind=20):
    """First message to an engine or worker: the plan as JSON."""

    plan: str


@dataclass(slots=True)
class Submit(Message, kind=21):
    """New requests. Prompt i is `tokens[offsets[i]:offsets[i + 1]]`; top_k 0, top_p 1 are off.

    `rules` is empty, or a JSON list of [place in the batch, `LogitRules.asked`]: what is asked from
    there on.
    """

    request_ids: I64
    arrivals_s: F64
    offsets: I64
    tokens: I32
    max_tokens: I32
    ignore_eos: U8
    temperature: F32
    top_k: I32
    top_p: F32
    seeds: I64
    logprobs: U8  # `asks_for`
    rules: str = ""


@dataclass(slots=True)
class Cancel(Message, kind=22):
    """The client is gone or has all that it wants; the engine frees what these requests hold."""

    request_ids: I64


@dataclass(slots=True)
class Refused(Message, kind=23):
    """A submitted request that can never run, or never end as it asks: why, and which of its
    parameters is to blame."""

    request_id: int
    text: str
    param: str = "prompt"
    is_busy: int = 0  # 1: it cannot run now; sent again later it may


@dataclass(slots=True)
class GivenUp(Message, kind=29):
    """A worker is lost with this request whenever it computes it, so nobody will any more."""

    request_id: int
    text: str


@dataclass(slots=True)
class Tokens(Message, kind=24):
    """One round's tokens. `engines` are `types.Owner`s; STOP is an EOS or a stop token."""

    request_ids: I64
    tokens: I32
    engines: U8
    finished: U8
    made_s: float  # when the round was applied
    num_prompt_tokens: int  # of the prompts whose first token is among these
    asking: I32 = field(default_factory=no_words)  # places here of tokens that are told about
    logprobs: I32 = field(default_factory=no_words)  # as many words each (`logprobs.num_words`)


@dataclass(slots=True)
class Scheduled(Message, kind=28):
    """Requests whose first round has been decided; goes before any of their tokens."""

    request_ids: I64
    queued_s: F64  # when the engine took each in
    scheduled_s: float


@dataclass(slots=True)
class AskStats(Message, kind=25):
    """Answered by `Stats`."""


@dataclass(slots=True)
class Stats(Message, kind=26):
    """State of queues, pools, rounds and workers as a JSON object."""

    info: str


@dataclass(slots=True)
class Shutdown(Message, kind=27):
    """Finish or drop what runs within `drain_s`, then end."""

    drain_s: float
