"""Sizes of everything that two processes share, computed alike on both sides from the plan."""

from dualpace.runtime.assist import AssistLayout
from dualpace.runtime.channel import ChannelSize
from dualpace.runtime.kv.layout import KvLayout
from dualpace.runtime.lockstep import LockstepLayout
from dualpace.runtime.plan import Plan

_ROW_BYTES = 64  # all per-row fields of a batch together
_FIXED_BYTES = 4096  # headers and array lengths
_SLOTS_UP = 256  # phases, transfers and assists between two looks of the engine
MAX_STEPS_IN_FLIGHT = 2


def itemsize(plan: Plan) -> int:
    """Bytes of one activation or KV element."""
    return {"bf16": 2, "float32": 4}[plan.model.dtype]


def max_gpu_rows(plan: Plan) -> int:
    """Rows of the largest GPU batch."""
    return plan.gpu.max_batch_size


def channel_size(plan: Plan, role: str) -> ChannelSize:
    """Bounds every message by what the pools and limits can hold: the block tables of a batch name
    no block twice, but a migration names its source and its target."""
    blocks = 4 * (plan.kv.gpu_blocks + plan.kv.host_blocks)
    if role == "gpu":
        rows = max_gpu_rows(plan) + (plan.cpu.max_batch_size if plan.policy.lockstep else 0)
        migrations = plan.kv.gpu_blocks + plan.kv.host_blocks  # each moves at least a block
        down = 3 * blocks + (rows + migrations) * _ROW_BYTES + 4 * plan.gpu.max_batched_tokens
    else:
        rows = plan.cpu.max_batch_size
        down = blocks + rows * _ROW_BYTES
    up = max(64 * 1024, 16 * rows)
    batches = MAX_STEPS_IN_FLIGHT * (2 if plan.policy.lockstep else 1)  # host rows come first
    return ChannelSize(batches + 1, down + _FIXED_BYTES, _SLOTS_UP, up + _FIXED_BYTES)


def assist_layout(plan: Plan) -> AssistLayout:
    model = plan.model
    return AssistLayout(
        max_rows=plan.cpu.max_batch_size,
        hidden=model.hidden,
        attention_width=model.num_q_heads * model.head_dim,
        itemsize=itemsize(plan),
    )


def lockstep_layout(plan: Plan) -> LockstepLayout:
    model = plan.model
    return LockstepLayout(
        max_rows=plan.cpu.max_batch_size,
        q_width=model.num_q_heads * model.head_dim,
        kv_width=model.num_kv_heads * model.head_dim,
        itemsize=itemsize(plan),
    )


def kv_layout(plan: Plan) -> KvLayout:
    model = plan.model
    return KvLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        itemsize=itemsize(plan),
    )
