"""Attention of the accelerator's stand-in: ragged prompts by torch SDPA, and a reference decode.

Shape suffixes: T rows of all prompts, N query heads, K key/value heads, D head size, L tokens of
one context, B decode rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16  # tokens of a KV block

Context = tuple[Tensor, Tensor]  # earlier k and v of one prompt, [L, K, D] each


def causal_prefill(
    q_TND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    query_lens: Sequence[int],
    contexts: Sequence[Context | None] | None = None,
) -> Tensor:
    """Causal attention within each prompt, prompts laid one after the other: [T, N, D].

    `contexts[i]` is what prompt i already stored, for a chunk that is not its first.
    """
    assert sum(query_lens) == q_TND.shape[0]
    out_TND = torch.empty_like(q_TND)
    start = 0
    for index, length in enumerate(query_lens):
        rows = slice(start, start + length)
        context = contexts[index] if contexts is not None else None
        out_TND[rows] = _attend(q_TND[rows], k_TKD[rows], v_TKD[rows], context)
        start += length
    return out_TND


def _attend(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: Context | None) -> Tensor:
    mask = None
    if context is not None and context[0].shape[0]:
        earlier, length = context[0].shape[0], q_TND.shape[0]
        k_TKD, v_TKD = torch.cat((context[0], k_TKD)), torch.cat((context[1], v_TKD))
        mask = torch.ones(length, earlier + length, dtype=torch.bool, device=q_TND.device)
        mask = mask.tril(diagonal=earlier)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_TKD, v_TKD))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def gather_context(kv_cache: Tensor, blocks: Tensor, length: int) -> Context:
    """k and v [L, K, D] of the first `length` tokens in `blocks` (ids, int64 [n]).

    kv_cache: HND, [num_blocks, 2, K, 16, D], any block stride.
    """
    used = kv_cache[blocks[: -(-length // BLOCK)]]
    k, v = used.transpose(2, 3).flatten(3).transpose(0, 1).flatten(1, 2)[:, :length].unbind(0)
    shape = (length, kv_cache.shape[2], kv_cache.shape[4])
    return k.reshape(shape), v.reshape(shape)


def paged_decode_reference(
    q_BND: Tensor, kv_cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """One query a row over its paged context, in float32, as plainly as can be: [B, N, D]."""
    out_BND = torch.empty_like(q_BND)
    group = q_BND.shape[1] // kv_cache.shape[2]
    for row, length in enumerate(context_lens.tolist()):
        k_LKD, v_LKD = gather_context(kv_cache, block_tables[row].long(), length)
        k_LND = k_LKD.float().repeat_interleave(group, dim=1)
        v_LND = v_LKD.float().repeat_interleave(group, dim=1)
        scores_NL = torch.einsum("nd,lnd->nl", q_BND[row].float(), k_LND) * scale
        out_BND[row] = torch.einsum("nl,lnd->nd", scores_NL.softmax(dim=-1), v_LND)
    return out_BND
