"""DualPace: LLM serving on one node with two engines that keep their own pace."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualpace.llm import LLM, Logprob, Output
    from dualpace.runtime.sampling_params import SamplingParams
    from dualpace.runtime.structured import StructuredOutputsParams

__all__ = ["LLM", "Logprob", "Output", "SamplingParams", "StructuredOutputsParams"]

_HOMES = {
    "LLM": "dualpace.llm",
    "Logprob": "dualpace.llm",
    "Output": "dualpace.llm",
    "SamplingParams": "dualpace.runtime.sampling_params",
    "StructuredOutputsParams": "dualpace.runtime.structured",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first asked for, so that importing dualpace stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dualpace' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
