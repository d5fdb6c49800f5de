"""How the tests run a whole model through the stages, and the tiny checkpoints they compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dualpace.graphs.attention import causal_prefill
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.executor import Stages
from dualpace.graphs.load import load_weights
from dualpace.graphs.source import resolve_source

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}

KV = list[tuple[Tensor, Tensor]]


def save_tiny(folder: Path, config: Any, shard: str = "1GB") -> Any:
    """Save a random instance of a configuration to `folder` and return it, in float32."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases of one and zero would hide a forgotten one.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(4 if "embed" not in name else 20)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def load_stages(source: str, dtype: torch.dtype = torch.float32, **options: Any) -> Stages:
    found = resolve_source(source)
    return GraphCache().build(found.spec, load_weights(found, dtype), **options)


def run_logits(stages: Stages, num_layers: int, ids: list[int], kv: KV | None = None) -> Tensor:
    """Logits [T, V] of one sequence; `kv`, if given, holds what came before and is extended."""
    start = kv[0][0].shape[0] if kv else 0
    positions = torch.arange(start, start + len(ids))
    x = stages.pre_layer(torch.tensor(ids))
    for layer in range(num_layers):
        q, k, v = stages.pre_attention(layer, x, positions)
        attn = causal_prefill(q, k, v, [len(ids)], [kv[layer]] if start and kv else None)
        x = stages.post_attention(layer, attn.flatten(1), x)
        if kv is not None:
            if start:
                kv[layer] = (torch.cat((kv[layer][0], k)), torch.cat((kv[layer][1], v)))
            else:
                kv.append((k, v))
    return stages.logits(x)


def hf_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    """Largest difference relative to the largest logit."""
    assert ours.shape == theirs.shape
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error < tolerance, f"relative error {error:.2e}"
