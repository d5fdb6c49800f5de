"""Qwen 3, dense: RMSNorm on every query and key head."""

from dualpace.graphs.models.family import Family

QWEN3 = Family(architecture="Qwen3ForCausalLM", gguf_architecture="qwen3", qk_norm=True)
