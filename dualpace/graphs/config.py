"""Schemas of the model and of stage compilation. Plain data: no torch, no lookups."""

from dataclasses import dataclass

DTYPES = ("auto", "bf16", "float32")
BACKENDS = ("auto", "eager", "inductor", "inductor-packed")


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """Which model is served, and in which precision."""

    source: str = "smollm2"  # smollm2 | a Hugging Face folder | a .gguf file | random:<shape>
    name: str | None = None  # the name that clients see; None: the source's own
    dtype: str = "auto"  # auto | bf16 | float32
    max_context: int | None = None  # tokens; None: as many as the model and the pools allow
    seed: int = 0  # of random weights


@dataclass(slots=True, kw_only=True)
class CompileConfig:
    """How stages become graphs. The two specific backends override `backend` where set."""

    backend: str = "auto"  # auto | eager | inductor | inductor-packed
    backend_gpu: str | None = None
    backend_cpu: str | None = None
    buckets: list[int] | None = None  # row counts that stages are compiled for; None: from limits
    cache_dir: str | None = None  # for kernels and graphs; None: the compilers' own places
