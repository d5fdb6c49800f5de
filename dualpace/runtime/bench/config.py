"""Schemas of workloads (which requests arrive, when, how long they are), of the load generator and
of plots. No I/O."""

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
class GoodputConfig:
    """Targets in ms that a request must meet all of; None: no target. `itl` is for every gap."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2el: float | None = None


@dataclass
class LoadConfig:
    """How a workload is put to a server, and what becomes of the answers.

    Without `url` a server is started for the run: this configuration's own, or `peer`'s (vllm,
    vllm_offload, llama_cpp). With `url` a running one is used, and `peer` only names it.
    Open loop unless `concurrency` is set: requests leave at their scheduled times whatever the
    server does, and latencies count from those times.
    """

    url: str | None = None
    model: str | None = None  # as the server calls it; None: the first that it lists
    peer: str | None = None
    peer_command: list[str] | None = None  # instead of the peer's own
    peer_args: list[str] = field(default_factory=list)  # appended to the peer's command
    label: str | None = None  # the curve's name in figures; None: the peer or the policy
    profile: str | None = None  # the machine's name in figures; None: hw and model
    rates: list[float] = field(default_factory=list)  # one after the other; else workload.rate
    concurrency: int | None = None  # closed loop: this many requests at a time
    ramp_from: float | None = None  # open loop: rate at the start (1/s); it ends at workload.rate
    ramp_shape: str = "linear"  # linear | exponential
    warmup: int = 4  # requests before the clock starts
    goodput: GoodputConfig = field(default_factory=GoodputConfig)
    percentiles: list[float] = field(default_factory=lambda: [90.0, 99.0])
    timeout_s: float | None = None  # for one request; None: as long as it takes
    start_timeout_s: float = 900.0  # for a server that is started here
    client_cores: int | None = None  # kept from a server started here; None: 1 if there are 4
    vocab: int = 256  # prompts are random ids below it; any model knows these
    server_log: str | None = None  # file for the output of a server started here
    records: str | None = None  # file for JSON lines, one a request
    out: str | None = None  # folder of a sweep: results, and its figures at the end
    figures: list[int] = field(default_factory=list)


@dataclass
class PlotConfig:
    """Root of plot.yaml: files or folders of results, where figures go, and which; `page` names a
    Markdown file in `out` for the results page.

    `profiles` picks machines and their order from left to right; empty takes all as they are found.
    Figure 1 shows the first, over time at `timeline_rate` (null: the highest rate there is).
    """

    results: list[str] = field(default_factory=lambda: ["runs"])
    out: str = "figures"
    profiles: list[str] = field(default_factory=list)
    timeline_rate: float | None = None
    page: str | None = None
    title: str = "Results"
    figures: list[int] = field(default_factory=lambda: [1, 9, 10, 11, 13, 14, 15])
