"""Schemas of the model and of stage compilation. Plain data: no torch, no lookups."""

from dataclasses import dataclass

DTYPES = ("auto", "bf16", "float32")
BACKENDS = (
    "auto",
    "eager",
    "packed",
    "inductor",
    "inductor-packed",
    "rows",
    "inductor-rows",
    "amx",
    "inductor-amx",
    "avx512-bf16",
    "inductor-avx512-bf16",
    "ipex",
)
FLOAT32_BACKENDS = ("rows", "inductor-rows")
BF16_BACKENDS = BACKENDS[BACKENDS.index("amx") :]  # have no float32
STARTS = ("tiered", "ahead")


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

    backend: str = "auto"  # auto: timed on this machine, the fastest for each stage and bucket
    backend_gpu: str | None = None  # of the accelerator's stages
    backend_cpu: str | None = None  # of the CPU engine's
    buckets: list[int] | None = None  # row counts that stages are compiled for; None: from limits
    cache_dir: str | None = None  # for kernels and graphs; None: dualpace in the user's cache
    # tiered: serve at once, swap in what is compiled meanwhile; ahead: compile first
    start: str = "tiered"
