"""Registry of model families: architecture name -> "module:attribute", imported when asked for."""

from importlib import import_module

from dualpace.errors import ConfigError
from dualpace.graphs.models.family import Family

MODELS = {
    "LlamaForCausalLM": "dualpace.graphs.models.llama:LLAMA",
    "MistralForCausalLM": "dualpace.graphs.models.llama:MISTRAL",
    "Qwen2ForCausalLM": "dualpace.graphs.models.qwen2:QWEN2",
    "Qwen3ForCausalLM": "dualpace.graphs.models.qwen3:QWEN3",
}


def family_of(architecture: str) -> Family:
    """The family of a Hugging Face architecture name; ConfigError for one we do not serve."""
    if architecture not in MODELS:
        raise ConfigError(
            f"model architecture {architecture} is not supported; DualPace serves "
            f"{', '.join(sorted(MODELS))}"
        )
    module, attribute = MODELS[architecture].split(":")
    family = getattr(import_module(module), attribute)
    assert isinstance(family, Family) and family.architecture == architecture
    return family


def family_of_gguf(architecture: str) -> Family:
    """The family of a GGUF file's `general.architecture`."""
    families = [family_of(name) for name in MODELS]
    known = {f.gguf_architecture: f for f in families if f.gguf_architecture is not None}
    if architecture not in known:
        raise ConfigError(
            f"GGUF architecture {architecture} is not supported; DualPace serves "
            f"{', '.join(sorted(known))}"
        )
    return known[architecture]
