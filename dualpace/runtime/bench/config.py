"""Schemas of workloads (which requests arrive, when, how long they are) and of plots. No I/O."""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class WorkloadConfig:
    """Common to every kind of workload.

    `rate` is in requests per second, `inf` sends all at once. `prompt_mean` and `output_mean` scale
    the lengths to these means and keep their shape. `max_tokens` is `trace` (the trace's output
    length) or `unset` (left out, as a careless client does).
    """

    name: str = MISSING
    label: str | None = None  # how results and figures call it; None: its name
    num_requests: int = 1000
    rate: float = float("inf")
    arrival: str = "exponential"  # exponential | constant | trace
    prompt_mean: float | None = None
    output_mean: float | None = None
    seed: int = 0
    max_tokens: str = "trace"


@dataclass
class AzureWorkloadConfig(WorkloadConfig):
    """Azure LLM inference traces: the CSV files of 2023 and of 2024."""

    name: str = "azure"
    path: str = MISSING


@dataclass
class ShareGptWorkloadConfig(WorkloadConfig):
    """A JSON list of conversations (lengths estimated from text) or of explicit lengths."""

    name: str = "sharegpt"
    path: str = MISSING
    chars_per_token: float = 4.0


@dataclass
class FixedWorkloadConfig(WorkloadConfig):
    """Every request has the same lengths."""

    name: str = "fixed"
    prompt_len: int = 1024
    output_len: int = 128


@dataclass
class LognormalWorkloadConfig(WorkloadConfig):
    """Lengths drawn from two lognormal distributions, given by median and log-space deviation."""

    name: str = "lognormal"
    prompt_median: float = 1024.0
    prompt_sigma: float = 1.0
    output_median: float = 128.0
    output_sigma: float = 1.0
    max_len: int = 32768


@dataclass
class PlotConfig:
    """Root of plot.yaml: files or folders of results, where figures go, and which.

    `profiles` picks machines and their order from left to right; empty takes all as they are found.
    Figure 1 shows the first, over time at `timeline_rate` (null: the highest rate there is).
    """

    results: list[str] = field(default_factory=lambda: ["runs"])
    out: str = "figures"
    profiles: list[str] = field(default_factory=list)
    timeline_rate: float | None = None
    figures: list[int] = field(default_factory=lambda: [1, 9, 10, 11, 13, 14, 15])
