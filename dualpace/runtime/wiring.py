"""Sizes of everything that two processes share, computed alike on both sides from the plan."""

from collections.abc import Sequence
from itertools import pairwise

from dualpace.block import BLOCK_TOKENS
from dualpace.runtime.assist import AssistLayout
from dualpace.runtime.channel import ChannelSize
from dualpace.runtime.kv.layout import KvLayout
from dualpace.runtime.lockstep import LockstepLayout
from dualpace.runtime.logit_rules import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKENS,
    words_of_mask,
)
from dualpace.runtime.logprobs import num_words
from dualpace.runtime.plan import Plan
from dualpace.runtime.sampling_params import MAX_LOGPROBS
from dualpace.runtime.shared_memory import Stretch

_ROW_BYTES = 64  # all per-row fields of a batch together
_FIXED_BYTES = 4096  # headers and array lengths
_PAIR_BYTES = 12  # of `messages.Edits` for a row and a token
_SLOTS_UP = 256  # phases, transfers and assists between two looks of the engine
_LARGE_PAGE = 2 << 20
MAX_STEPS_IN_FLIGHT = 2
COLLECTIVE_SLOT_BYTES = 2 << 20  # what one rank gives to a sum at once; more goes in pieces


def channel_size(plan: Plan, role: str) -> ChannelSize:
    """Bounds every message by what the pools and limits can hold: the block tables of a batch name
    no block twice, but a migration names its source and its target."""
    blocks = 4 * (plan.kv.gpu_pool_blocks + plan.kv.host_pool_blocks)
    if role == "gpu" or plan.policy.lockstep:  # both get the batches that hold host rows
        rows = plan.gpu.max_batch_size + plan.cpu.max_batch_size
        migrations = plan.kv.gpu_blocks + plan.kv.host_blocks  # each moves at least a block
        down = 3 * blocks + (rows + migrations) * _ROW_BYTES + 4 * plan.gpu.max_batched_tokens
    else:
        rows = plan.cpu.max_batch_size
        down = blocks + rows * _ROW_BYTES
    down += edits_bytes(plan, rows, blocks // 4)
    up = max(64 * 1024, (16 + 4 * num_words(MAX_LOGPROBS)) * rows)
    return ChannelSize(MAX_STEPS_IN_FLIGHT + 1, down + _FIXED_BYTES, _SLOTS_UP, up + _FIXED_BYTES)


def edits_bytes(plan: Plan, rows: int, blocks: int) -> int:
    """Of the longest encoded `messages.Edits` of so many rows, whose tokens lie in so many blocks:
    each row may name what its request lists, every token that it has, and the whole vocabulary in
    bits."""
    biased = MAX_LOGIT_BIAS + MAX_STOP_TOKENS + len(plan.model.eos_token_ids)
    listed = max(biased, MAX_ALLOWED_TOKENS)
    pairs = rows * listed + blocks * BLOCK_TOKENS
    mask = 4 * words_of_mask(plan.model.vocab)
    return rows * (_ROW_BYTES + mask) + pairs * _PAIR_BYTES + _FIXED_BYTES


def assist_layout(plan: Plan) -> AssistLayout:
    model = plan.model
    return AssistLayout(
        max_rows=plan.cpu.max_batch_size,
        hidden=model.hidden,
        attention_width=model.num_q_heads * model.head_dim,
        itemsize=model.itemsize,
        attention_parts=plan.cpu.tp,
        edits_bytes=edits_bytes(plan, plan.cpu.max_batch_size, plan.kv.host_pool_blocks),
        logprob_words=num_words(MAX_LOGPROBS),
    )


def lockstep_layout(plan: Plan) -> LockstepLayout:
    model = plan.model
    return LockstepLayout(
        max_rows=plan.cpu.max_batch_size,
        q_width=model.num_q_heads // plan.gpu.tp * model.head_dim,
        kv_width=model.num_kv_heads // plan.gpu.tp * model.head_dim,
        itemsize=model.itemsize,
        askers=plan.gpu.tp,
        answerers=plan.cpu.tp,
    )


def kv_layout(plan: Plan, tp: int = 1) -> KvLayout:
    """Of one rank of `tp`."""
    model = plan.model
    return KvLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads // tp,
        head_dim=model.head_dim,
        itemsize=model.itemsize,
    )


def host_shard_bytes(plan: Plan) -> int:
    """Of each CPU rank's part of the host pool; several begin on pages of their own."""
    nbytes = kv_layout(plan, plan.cpu.tp).host_bytes(plan.kv.host_pool_blocks)
    return nbytes if plan.cpu.tp == 1 else -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE


def host_pool_bytes(plan: Plan) -> int:
    """The shards of all CPU ranks, one after another."""
    return plan.cpu.tp * host_shard_bytes(plan)


def host_pool_stretches(plan: Plan) -> list[Stretch]:
    """Each rank's shard is near the rank; one alone stays where the engine is."""
    return [(host_shard_bytes(plan), cores) for cores in _several(plan.cpu.rank_cores)]


def assist_stretches(plan: Plan) -> list[Stretch]:
    """Each rank's attention is near the rank."""
    ranks, layout = _several(plan.cpu.rank_cores), assist_layout(plan)
    starts = [layout.offsets()[f"attention_{rank}"][0] for rank in range(len(ranks))]
    lengths = [end - start for start, end in pairwise([0, *starts, layout.nbytes])]
    return list(zip(lengths, [(), *ranks], strict=True)) if ranks else []


def _several(ranks: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    return ranks if len(ranks) > 1 else ()


def collective_bytes(size: int) -> int:
    """Room for `size` ranks that add and gather over shared memory."""
    return size * (2 * COLLECTIVE_SLOT_BYTES + 4096)


def ranks_of(plan: Plan, role: str) -> int:
    return plan.gpu.tp if role == "gpu" else plan.cpu.tp
