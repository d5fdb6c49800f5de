"""What distinguishes one family of checkpoints: its names for our packed tensors, and its options.

A family is data. A new architecture that fits the stages is one module with one `Family` and one
line in `models.MODELS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Checkpoint names of each packed tensor; several names are stacked along the rows."""

    top: Mapping[str, str]
    layer: Mapping[str, tuple[str, ...]]
    layer_prefix: str  # with {layer}


HF_NAMES = TensorNames(
    top={
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
    layer={
        "attn_norm": ("input_layernorm.weight",),
        "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "o": ("self_attn.o_proj.weight",),
        "mlp_norm": ("post_attention_layernorm.weight",),
        "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": ("mlp.down_proj.weight",),
    },
    layer_prefix="model.layers.{layer}.",
)

GGUF_NAMES = TensorNames(
    top={
        "embed": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "head": "output.weight",
    },
    layer={
        "attn_norm": ("attn_norm.weight",),
        "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
        "qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        "q_norm": ("attn_q_norm.weight",),
        "k_norm": ("attn_k_norm.weight",),
        "o": ("attn_output.weight",),
        "mlp_norm": ("ffn_norm.weight",),
        "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
        "down": ("ffn_down.weight",),
    },
    layer_prefix="blk.{layer}.",
)

# Options of a config.json that change the maths, with the values that mean "not used".
NOT_USED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "partial_rotary_factor": (1.0,),
        "quantization_config": (None,),
        "num_local_experts": (0, 1),
        "num_experts": (0, 1),
        "attention_chunk_size": (None,),
        "residual_multiplier": (1.0,),
        "logits_scaling": (1.0,),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture name of Hugging Face, and what it is called in a GGUF file."""

    architecture: str
    gguf_architecture: str | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_permuted: bool = False  # its GGUF files hold q and k rows in interleaved-RoPE order
    not_used: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: NOT_USED)
    hf_names: TensorNames = HF_NAMES
    gguf_names: TensorNames = GGUF_NAMES
