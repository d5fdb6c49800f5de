"""Others' attention on the same K and V, for the benchmark of ours: torch's, and vLLM's where it is
installed. This file knows nothing about ours but a benchmark's case.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dualpace.cpu.attention_case import AttentionCase
from dualpace.cpu.isa import Level

Run = Callable[[], Tensor]
_TOKENS = 32  # of a vLLM block: its AMX kernel takes no fewer
_OPERATIONS = "vllm._custom_ops"


def sdpa(case: AttentionCase) -> Run:
    """torch's attention on K and V that are gathered already."""
    k, v = (part.contiguous() for part in case.gathered(case.heads.dtype, slice(None)))
    q = case.q.unsqueeze(2)

    def run() -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, scale=case.scale, enable_gqa=True)
        return out.squeeze(2)

    return run


def why_no_vllm(dtype: torch.dtype) -> str | None:
    """Why vLLM's CPU attention cannot be run here on such K and V, or None."""
    if dtype != torch.bfloat16:
        return "vLLM's CPU attention is set beside ours in bf16 alone"
    try:
        operations = import_module(_OPERATIONS)
    except ImportError as error:
        return f"vLLM's CPU attention is not installed ({error})"
    if not hasattr(operations, "cpu_attention_with_kv_cache"):
        return "the vLLM that is installed has no CPU attention"
    return None


def vllm(case: AttentionCase, level: Level) -> Run:
    """vLLM's, on a cache of its own layout, filled by its own operation. What it raises where its
    release takes other arguments than 0.12's is the caller's to see.
    """
    operations: Any = import_module(_OPERATIONS)
    k, v = case.gathered(torch.bfloat16, slice(None))  # [rows, kv_heads, context, d]
    rows, kv_heads, context, dim = k.shape
    blocks = -(-context // _TOKENS)
    keys = k.new_zeros(rows * blocks, kv_heads, _TOKENS, dim)
    values = torch.zeros_like(keys)
    tables = torch.randperm(rows * blocks).int().view(rows, blocks)
    tokens = torch.arange(context)
    slots = (tables.long()[:, tokens // _TOKENS] * _TOKENS + tokens % _TOKENS).flatten()
    isa = "amx" if level == Level.AMX else "vec"
    flat = (part.transpose(1, 2).reshape(-1, kv_heads, dim) for part in (k, v))
    operations.cpu_attn_reshape_and_cache(*flat, keys, values, slots, isa)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    lens = torch.full((rows,), context, dtype=torch.int32)
    metadata = operations.cpu_attn_get_scheduler_metadata(
        num_reqs=rows,
        num_heads=case.heads.q,
        num_kv_heads=kv_heads,
        head_dim=dim,
        seq_lens=lens,
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    out = torch.empty_like(case.q)

    def run() -> Tensor:
        operations.cpu_attention_with_kv_cache(
            query=case.q,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=starts,
            seq_lens=lens,
            scale=case.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=(-1, -1),
            block_table=tables,
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
        )
        return out

    return run
