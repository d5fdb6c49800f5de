"""Schema of the CPU engine's worker. Plain data."""

from dataclasses import dataclass

ALL_REDUCES = ("auto", "shared_memory", "gloo")
MAX_BATCH_SIZE = 256  # cpu.max_batch_size where neither a setting nor a profile says


@dataclass(slots=True, kw_only=True)
class CpuConfig:
    """The engine that decodes host-resident requests."""

    threads: int | None = None  # of one rank; None: the cores that the core map gives it
    # Requests in one decode batch (paper 4.3). None: the profile's, else 256
    max_batch_size: int | None = None
    # Prefill-to-CPU is admitted only while fewer requests wait for the CPU; None: max_batch_size
    max_waiting: int | None = None
    tp: int = 1  # ranks, one NUMA node each
    # How ranks add their parts: auto: shared_memory, which measured faster | gloo
    all_reduce: str = "auto"
