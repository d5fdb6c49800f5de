"""Schema of a profiling sweep: what is measured, how hard, and where it goes. Plain data."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class SweepConfig:
    """Sizes are rows and tokens. The largest route batch must exceed the largest decode batch:
    Full-CPU for every batch comes out only where a size above the CPU limit was measured."""

    name: str | None = None  # of the profile; None: from machine and model
    point: str | None = None  # measure this one only; `fit`: none; None: all, then fit
    results: str = "runs/profile"  # folder of finished points, from which a rerun resumes
    out: str | None = None  # folder that gets measured/ and simulated/; None: conf
    figures: str | None = None  # folder of figures and report; None: beside the points
    route_batches: list[int] = field(default_factory=lambda: [1, 8, 64, 256, 320])  # rows
    beside_batches: list[int] = field(default_factory=lambda: [8, 64])  # rows of assists
    decode_batches: list[int] = field(default_factory=lambda: [1, 16, 64, 256])  # rows
    decode_contexts: list[int] = field(default_factory=lambda: [128, 512])  # tokens
    prefill_batches: list[int] = field(default_factory=lambda: [1, 4])  # prompts
    prefill_lengths: list[int] = field(default_factory=lambda: [16, 64, 256, 512])  # tokens
    prefill_max_tokens: int = 2048  # shapes above it are left out
    step_batches: list[int] = field(default_factory=lambda: [1, 16, 64])  # rows
    step_contexts: list[int] = field(default_factory=lambda: [16, 512])  # tokens
    copy_blocks: int = 64  # in one copy between the tiers
    calibration_rows: int = 8  # decoded on the GPU during calibration; 0: it is idle
    calibration_context: int = 128  # KV tokens of each of these rows, and of the CPU's
    calibration_iterations: int = 10  # a route and batch size
    warmups: int = 5  # W
    invocations: int = 100  # I
    repeats: int = 3  # R
    max_seconds: float = 2.0  # a primitive; fewer invocations where they would take longer
    layers: int | None = None  # that a point runs (at least 2); None: all of the model
    temperature: float = 1.0  # of the sampled rows; 0 is greedy
    gpu_weight: float = 1.0  # lambda of Equation 6
    epsilon: float = 0.0025  # regret that fewer assists may cost
    plateau_points: int = 5  # K
    tolerance: float = 0.01  # delta, of the GPU's token limit and the CPU's batch limit
    share_child: bool = False  # all points in one process: shorter, and less isolated
    timeout_s: float = 1800.0  # of one child process; the first may have graphs to compile
    check: bool = True  # serve a small load with the result and compare the simulator's guess
    check_requests: int = 48  # all at once
    check_prompt: int = 96  # tokens each
    check_output: int = 32  # tokens each
