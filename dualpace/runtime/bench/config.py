"""Schemas of workloads (which requests arrive, when, how long they are), of the load generator and
of plots. No I/O."""

from dataclasses import dataclass, field

from omegaconf import MISSING

FIGURES = (1, 8, 9, 10, 11, 12, 13, 14, 15)  # of the paper's, those that can be drawn


@dataclass
class WorkloadConfig:
    """Common to every kind of workload."""

    name: str = MISSING  # chosen with workload=NAME
    label: str | None = None  # how results and figures call it; None: its name
    num_requests: int = 1000  # in all
    rate: float = float("inf")  # requests per second; inf: all at once, or as in the trace
    arrival: str = "exponential"  # exponential | constant | trace
    prompt_mean: float | None = None  # lengths are scaled to this mean and keep their shape
    output_mean: float | None = None  # likewise
    seed: int = 0  # of arrivals and lengths
    # trace: the trace's output length | unset: left out, as a careless client does
    max_tokens: str = "trace"


@dataclass
class AzureWorkloadConfig(WorkloadConfig):
    """Azure LLM inference traces: the CSV files of 2023 and of 2024."""

    name: str = "azure"  # chosen with workload=azure
    path: str = MISSING  # of the trace's CSV file


@dataclass
class ShareGptWorkloadConfig(WorkloadConfig):
    """A JSON list of conversations (lengths estimated from text) or of explicit lengths."""

    name: str = "sharegpt"  # chosen with workload=sharegpt
    path: str = MISSING  # of the JSON file
    chars_per_token: float = 4.0  # of conversations


@dataclass
class FixedWorkloadConfig(WorkloadConfig):
    """Every request has the same lengths."""

    name: str = "fixed"  # chosen with workload=fixed
    prompt_len: int = 1024  # tokens
    output_len: int = 128  # tokens


@dataclass
class LognormalWorkloadConfig(WorkloadConfig):
    """Lengths drawn from two lognormal distributions, given by median and log-space deviation."""

    name: str = "lognormal"  # chosen with workload=lognormal
    prompt_median: float = 1024.0  # tokens
    prompt_sigma: float = 1.0  # of the logarithm
    output_median: float = 128.0  # tokens
    output_sigma: float = 1.0  # of the logarithm
    max_len: int = 32768  # tokens; longer draws are cut


@dataclass
class GoodputConfig:
    """Targets in ms that a request must meet all of; None: no target."""

    ttft: float | None = None  # to the first token
    itl: float | None = None  # every gap between tokens
    tpot: float | None = None  # mean time a token after the first
    e2el: float | None = None  # to the last token


@dataclass
class LoadConfig:
    """How a workload is put to a server, and what becomes of the answers.

    Open loop unless `concurrency` is set: requests leave at their scheduled times whatever the
    server does, and latencies count from those times.
    """

    url: str | None = None  # of a running server; None: one is started, of this configuration
    model: str | None = None  # as the server calls it; None: the first that it lists
    # vllm | vllm_offload | llama_cpp: started instead of ours; beside a url it is only its name
    peer: str | None = None
    peer_command: list[str] | None = None  # instead of the peer's own
    peer_args: list[str] = field(default_factory=list)  # appended to the peer's command
    label: str | None = None  # the curve's name in figures; None: the peer or the policy
    profile: str | None = None  # the machine's name in figures; None: hw and model
    rates: list[float] = field(default_factory=list)  # one after the other; else workload.rate
    seconds: float | None = None  # of load at each rate; None: workload.num_requests
    resume: bool = False  # keep the points whose results lie in `out` already
    concurrency: int | None = None  # closed loop: this many requests at a time
    ramp_from: float | None = None  # open loop: rate at the start (1/s); it ends at workload.rate
    ramp_shape: str = "linear"  # linear | exponential
    warmup: int = 4  # requests before the clock starts
    goodput: GoodputConfig = field(default_factory=GoodputConfig)
    percentiles: list[float] = field(default_factory=lambda: [90.0, 99.0])  # of every latency
    timeout_s: float | None = None  # for one request; None: as long as it takes
    start_timeout_s: float = 900.0  # for a server that is started here
    # Kept from a server started here; None: 1 if there are 4, and one beyond hw.cores
    client_cores: int | None = None
    vocab: int = 256  # prompts are random ids below it; any model knows these
    server_log: str | None = None  # file for the output of a server started here
    records: str | None = None  # file for JSON lines, one a request
    out: str | None = None  # folder of a sweep: results, and its figures at the end
    figures: list[int] = field(default_factory=list)  # by the paper's numbers
    page: str | None = None  # Markdown file in `out` with tables of all its results
    title: str = "Results"  # of the page


@dataclass
class PlotConfig:
    """Root of plot.yaml."""

    results: list[str] = field(default_factory=lambda: ["runs"])  # files or folders
    out: str = "figures"  # folder
    # Machines from left to right, Figure 1 shows the first; empty: all as they are found
    profiles: list[str] = field(default_factory=list)
    timeline_rate: float | None = None  # of Figure 1; None: the highest rate there is
    page: str | None = None  # a Markdown file in `out` for the results page
    title: str = "Results"  # of the page
    # By the paper's numbers
    figures: list[int] = field(default_factory=lambda: [*FIGURES])
