"""What the paper's evaluation reports (sections 6.2 and 6.3, Appendix C), for pages that set ours
beside it. Numbers alone."""

# In the order of its figures' columns.
MACHINES = (
    "Llama-3.1-8B on an RTX 4090 with 12 cores",
    "Qwen3-14B on two H20 with 24",
    "Qwen3-32B on four H20 with 48",
)

# Workload -> (target as `sustain.TARGETS` names it, other system) -> how many times the other's
# sustained rate DualPace carries, by machine. Its GPU-only system is vLLM 0.22.1.
GAINS: dict[str, dict[tuple[str, str], tuple[float, ...]]] = {
    "conversation": {
        ("1 s/token", "neo"): (1.432, 1.069, 1.181),
        ("1 s/token", "gpu_only"): (1.906, 1.115, 1.238),
        ("P99 ITL 1.5 s", "neo"): (1.505, 1.152, 1.073),
        ("P99 TPOT 1.5 s", "neo"): (1.61, 1.15, 1.03),
    },
    "code": {},
}
WORDS = {
    "conversation": (
        "At 5 s P99 TTFT it calls DualPace close to NEO, and vLLM's ITL and TPOT lower than both."
    ),
    "code": (
        "The paper prints no gains for code: it finds GPU only ahead in normalized latency on its "
        "two Qwen3 machines, and DualPace ahead of NEO."
    ),
}
GPU_ONLY = ("gpu_only", "vllm", "vllm_offload")


def gains(workload: str, other: str, target: str) -> tuple[float, ...]:
    """As `GAINS`; empty where the paper gives no number for it."""
    system = "gpu_only" if other in GPU_ONLY else other
    return GAINS.get(workload, {}).get((target, system), ())


def called(other: str) -> str:
    """How the paper calls the system that stands for a policy of ours."""
    return {"neo": "NEO"}.get(other, "vLLM")


def note(workload: str) -> str | None:
    """A paragraph under a table that holds the paper's gains; None for another workload."""
    if workload not in WORDS:
        return None
    if not GAINS[workload]:
        return WORDS[workload]
    machines = "; ".join(MACHINES)
    return f"The paper's machines, in this order: {machines}. {WORDS[workload]}"
