"""The stages of a decoder as pure functions of tensors, the same source on every device.

The boundaries are those of Figure 2: attention, between `pre_attention` and `post_attention`,
belongs to the engines. Every weight is an argument, so one executable serves all layers. Where a
model is divided over ranks, post-attention is two pieces, `output` and `mlp`, each of which leaves
a part of a sum to be added up over the ranks; `best` is greedy sampling before they compare.

Shape suffixes: T rows (tokens), H hidden, N query heads, K key/value heads, D head size,
P = D / 2 rotary pairs, I intermediate, V vocabulary, B rows to sample, C positions in the table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dualpace.graphs.linear import linear
from dualpace.graphs.rope import apply_rope


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x over its root mean square, in float32, then scaled in x's own dtype."""
    x = x_TH.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return weight_H * (x * scale).to(x_TH.dtype)


def pre_layer(token_ids_T: Tensor, embed_VH: Tensor) -> Tensor:
    """Embedding: int64 ids [T] -> x [T, H]."""
    return F.embedding(token_ids_T, embed_VH)


def pre_attention(
    x_TH: Tensor,
    positions_T: Tensor,
    cos_CP: Tensor,
    sin_CP: Tensor,
    norm_H: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    *,
    heads: tuple[int, int, int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, packed QKV, QK norm, RoPE. `heads` is (N, K, D), positions int64 [T].

    Returns q [T, N, D], k [T, K, D], v [T, K, D]; v may be a strided view.
    """
    N, K, D = heads
    h_TH = rms_norm(x_TH, norm_H, eps)
    qkv = linear(h_TH, qkv_weight, (N + 2 * K) * D, qkv_bias).view(-1, N + 2 * K, D)
    q_TND, k_TKD, v_TKD = torch.split(qkv, (N, K, K), dim=1)
    if q_norm_D is not None and k_norm_D is not None:
        q_TND, k_TKD = rms_norm(q_TND, q_norm_D, eps), rms_norm(k_TKD, k_norm_D, eps)
    cos_TP, sin_TP = cos_CP[positions_T], sin_CP[positions_T]
    return apply_rope(q_TND, cos_TP, sin_TP), apply_rope(k_TKD, cos_TP, sin_TP), v_TKD


def post_attention(
    attn_TA: Tensor,
    x_TH: Tensor,
    o_weight: Tensor,
    norm_H: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    *,
    intermediate: int,
    eps: float,
) -> Tensor:
    """O projection, residual, norm, gated MLP, residual. attn is [T, A = N * D]; returns [T, H]."""
    sums_TH = output(attn_TA, o_weight, hidden=x_TH.shape[-1])
    x_TH, sums_TH = mlp(
        x_TH, sums_TH, norm_H, gate_up_weight, down_weight, intermediate=intermediate, eps=eps
    )
    return x_TH + sums_TH


def output(attn_TA: Tensor, o_weight: Tensor, *, hidden: int) -> Tensor:
    """O projection of the heads that are here: [T, H]."""
    return linear(attn_TA, o_weight, hidden)


def mlp(
    x_TH: Tensor,
    sums_TH: Tensor,
    norm_H: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    *,
    intermediate: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """x + sums, and what the MLP's columns that are here make of its norm: both [T, H]."""
    hidden = x_TH.shape[-1]
    x_TH = x_TH + sums_TH
    h_TH = rms_norm(x_TH, norm_H, eps)
    gate_TI, up_TI = linear(h_TH, gate_up_weight, 2 * intermediate).chunk(2, dim=-1)
    return x_TH, linear(F.silu(gate_TI) * up_TI, down_weight, hidden)


def logits(x_BH: Tensor, norm_H: Tensor, head_weight: Tensor, *, vocab: int, eps: float) -> Tensor:
    """Final norm and LM head: float32 [B, V]."""
    return linear(rms_norm(x_BH, norm_H, eps), head_weight, vocab).float()


def post_layer_greedy(
    x_BH: Tensor, norm_H: Tensor, head_weight: Tensor, *, vocab: int, eps: float
) -> Tensor:
    """Final norm, LM head and the best token of each row: int32 [B]."""
    return logits(x_BH, norm_H, head_weight, vocab=vocab, eps=eps).argmax(dim=-1).int()


def best(
    x_BH: Tensor, norm_H: Tensor, head_weight: Tensor, *, vocab: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Each row's largest logit among the tokens that are here, and its row of the head: float32
    and int32 [B].
    """
    values_B, rows_B = logits(x_BH, norm_H, head_weight, vocab=vocab, eps=eps).max(dim=-1)
    return values_B, rows_B.int()
