"""Llama 2, 3, 3.1, 3.2, SmolLM2, and Mistral where its sliding window is not in use."""

from dualpace.graphs.models.family import Family

LLAMA = Family(architecture="LlamaForCausalLM", gguf_architecture="llama", gguf_permuted=True)
MISTRAL = Family(architecture="MistralForCausalLM")  # GGUF files call it llama
