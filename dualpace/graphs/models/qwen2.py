"""Qwen 2 and 2.5: a bias on Q, K and V."""

from dualpace.graphs.models.family import Family

QWEN2 = Family(architecture="Qwen2ForCausalLM", gguf_architecture="qwen2", qkv_bias=True)
