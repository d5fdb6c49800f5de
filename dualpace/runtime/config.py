"""Schemas that the runtime owns: GPU engine, KV pools, routing, policies, server, logs.

Plain data, not frozen (a frozen schema refuses overrides); `plan.py` freezes what they resolve to.
"""

from dataclasses import dataclass
from typing import ClassVar

from omegaconf import MISSING

DEVICES = ("auto", "cpu", "cuda")
ASSIST_MODES = ("boundary", "stream")
TOKEN_LIMIT = 1024  # gpu.token_limit where neither a setting nor a profile says
MAX_BATCHED_TOKENS = 8192  # gpu.max_batched_tokens where nothing says, if token_limit is no more
NEO_LAUNCH_MS = 0.8  # policy.launch_ms where nothing says and a device, real or simulated, launches
HOST_ADMISSIONS = ("always", "profile")
OUTPUT_ESTIMATES = ("declared", "quantile")


@dataclass(slots=True, kw_only=True)
class HwConfig:
    """Facts about the machine, as a `+hw=` file states them; `auto` means: probe it."""

    name: str = "auto"  # of the hw file; auto: none was named
    gpu: str | None = None  # product name, for readers alone
    gpus: int | None = None  # None: not stated; 0: there is none
    vram_gib: float | None = None  # of one GPU
    cpu: str | None = None  # product name, for readers alone
    cores: int | None = None  # physical cores given to serving
    host_gib: float | None = None  # memory that serving may use
    # A file of conf/measured, or a path | auto: the newest of conf/measured that was measured here
    # with this model, else as None | None: safe defaults
    profile: str | None = None


@dataclass(slots=True, kw_only=True)
class GpuConfig:
    """The engine that prefills everything and decodes the HBM-resident requests."""

    device: str = "auto"  # auto | cuda | cpu (torch on the CPU stands in)
    # Of the stand-in; None: the cores that the core map gives it. policy=gpu_only: at most the CPU
    # worker's as well
    threads: int | None = None
    # Soft: bounds optional prefill and swap-in (paper 4.3). None: the profile's, else 1024
    token_limit: int | None = None
    max_batched_tokens: int | None = None  # hard; None: the larger of token_limit and 8192
    max_batch_size: int = 256  # rows in one round
    tp: int = 1  # ranks, one GPU each

    def hard_limit(self, token_limit: int) -> int:
        """Tokens of a round that are never exceeded, where the soft limit is that."""
        return self.max_batched_tokens or max(token_limit, MAX_BATCHED_TOKENS)


@dataclass(slots=True, kw_only=True)
class KvConfig:
    """Sizes of both KV pools, in blocks of 16 tokens or in GiB; None: from the memory there is.

    Blocks are those that requests can use: each pool has one more, the scratch block.
    """

    gpu_blocks: int | None = None  # of the accelerator's pool
    host_blocks: int | None = None  # 0: no host tier
    gpu_gib: float | None = None  # instead of gpu_blocks
    host_gib: float | None = None  # instead of host_blocks
    output_estimate: str = "quantile"  # quantile | declared (the paper: max_tokens)
    # Debugging: each block that moved between the pools is compared with what it was; one that
    # differs ends the engine
    check_moves: bool = False


@dataclass(slots=True, kw_only=True)
class AssistConfig:
    """Routing thresholds (Equation 5): (0, 0), or F < P. Both None: the profile's, else every batch
    runs Full-CPU."""

    post_attention_limit: int | None = None  # P: largest CPU batch with local post-attention
    post_layer_limit: int | None = None  # F: largest CPU batch with a local post-layer
    # boundary: between a GPU round's stages, always with gpu.tp > 1 | stream: beside the round
    mode: str = "stream"


@dataclass(slots=True, kw_only=True)
class PolicyConfig:
    """Base of the policies' schemas; `name` picks the policy from the registry."""

    name: str = MISSING  # chosen with policy=NAME
    lockstep: ClassVar[bool] = False  # host-resident requests decode layer by layer with the GPU's


@dataclass(slots=True, kw_only=True)
class DualPacePolicyConfig(PolicyConfig):
    """The paper's two independent schedulers. policy=paper switches what goes beyond it off."""

    name: str = "dualpace"
    # always | profile: who gains by it, and batches are assisted that are worth it, judged by the
    # profile's times, or without any by times that the workers measure when they start
    host_admission: str = "profile"
    chunk_prompts: bool = True  # prompts for HBM are cut at gpu.token_limit; false: one forward
    # Debugging: whoever decodes in HBM leaves it after so many tokens, as if there were no room for
    # it; 0: nobody does
    migrate_every: int = 0


@dataclass(slots=True, kw_only=True)
class GpuOnlyPolicyConfig(PolicyConfig):
    """Chunked prefill and recompute preemption; no host tier."""

    name: str = "gpu_only"


@dataclass(slots=True, kw_only=True)
class NeoPolicyConfig(PolicyConfig):
    """GPU-gated asymmetric pipeline (paper 3.1)."""

    name: str = "neo"
    lockstep: ClassVar[bool] = True
    skips_longer: bool = True  # once a host row is refused, all as long are passed over
    needs_gpu_work: bool = True  # no host row runs without GPU rows
    launch_ms: float | None = None  # added to each predicted CPU attention of a layer; None: NEO's
    # 0.8 on a GPU and in a simulation, nothing where torch on the CPU stands in
    fp16_kernel: bool = True  # simulated CPU attention widens fp16 without AMX; false: our kernel


@dataclass(slots=True, kw_only=True)
class ServerConfig:
    """The HTTP front."""

    host: str = "127.0.0.1"  # address to listen at; 0.0.0.0: every interface
    port: int = 8000  # 0: any free one
    drain_timeout_s: float = 5.0  # after Ctrl-C, running streams may still end for so long


@dataclass(slots=True, kw_only=True)
class RuntimeConfig:
    """Logs and switches of the engine process."""

    round_log: str | None = None  # file for JSON lines, one a round
    request_log: str | None = None  # file for a JSON list, one entry a request
    look_ahead: bool = True  # schedule the next GPU round while one runs
    worker_module: str = "dualpace.runtime.worker"  # started with python -m; tests put fakes here
