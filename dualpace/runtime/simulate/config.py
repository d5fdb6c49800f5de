"""Schema of a simulation profile: a model and a machine as numbers. Rooflines need only datasheet
facts; a table, where one was measured, replaces the roofline of its primitive. No torch, no I/O."""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class ShapeConfig:
    """The model, as far as time and memory depend on it (bf16 weights and KV)."""

    num_layers: int = MISSING
    hidden: int = MISSING
    num_q_heads: int = MISSING
    num_kv_heads: int = MISSING
    head_dim: int = MISSING
    intermediate: int = MISSING
    vocab: int = MISSING


@dataclass
class TableConfig:
    """Measured ms at sizes `x` (rows, or KV tokens for attention): linear between the points and
    along the last segment beyond them, constant before the first."""

    x: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)


@dataclass
class GpuProfileConfig:
    """All GPUs of the server together where tp > 1, except the all-reduce."""

    memory_gb_s: float = MISSING  # datasheet, sum over GPUs
    memory_efficiency: float = MISSING  # of it, reading weights at few rows
    attention_efficiency: float = MISSING  # of it, decode attention reading KV
    tflops: float = MISSING  # datasheet, dense bf16, sum over GPUs
    gemm_efficiency: float = MISSING  # of it, at many rows
    prefill_attention_efficiency: float = MISSING  # of it, causal attention
    layer_us: float = 0.0  # fixed, a layer: kernel starts inside a captured graph
    poll_us: float = 0.0  # a layer, where stage boundaries are checked (6.4)
    tp: int = 1
    all_reduce_us: float = 0.0  # fixed, one call; two a layer where tp > 1
    all_reduce_gb_s: float = 1.0  # its payload beyond that


@dataclass
class CpuProfileConfig:
    """The cores of one CPU rank; `cpu.tp` of them share the work."""

    memory_gb_s: float = MISSING  # readable by these cores
    weight_efficiency: float = MISSING  # of it, dense stages at few rows
    attention_efficiency: float = MISSING  # of it, bf16 paged attention with AMX/AVX-512
    fp16_attention_efficiency: float = MISSING  # of it, a kernel that widens fp16 without AMX
    tflops: float = MISSING  # achieved by packed bf16 linears at many rows
    layer_us: float = 0.0  # fixed, a layer: barriers and small operations
    all_reduce_us: float = 0.0  # fixed, one call; two a layer where cpu.tp > 1
    all_reduce_gb_s: float = 1.0  # its payload beyond that


@dataclass
class LinkProfileConfig:
    """Between host memory and GPU, one direction."""

    gb_s: float = MISSING
    latency_us: float = MISSING  # one copy


@dataclass
class AssistProfileConfig:
    """Host side of one Dense Assist on the GPU worker, and what the CPU side adds."""

    launch_ms: float = MISSING
    finalize_ms: float = MISSING
    buffer_us: float = 0.0  # CPU worker writing and reading the assist buffer, one assist
    queued_stages: int = 0  # main stages already queued behind the running one when it asks
    # With assist.mode=stream, the CPU worker's wait for one beyond the device's interval
    beside_wait_ms: float = 0.0
    # The device's interval beside a main batch, as a multiple of the one on an idle device
    beside_stretch: float = 1.0
    # Of that interval, what the main batch loses. None: served between stages only
    beside_loss: float | None = None


@dataclass
class HostProfileConfig:
    """Python between rounds. Hidden where the next round was scheduled ahead."""

    gpu_round_ms: float = MISSING
    cpu_round_ms: float = MISSING


@dataclass
class LimitsConfig:
    """What the machine's memory holds and its offline profile chose (4.3); `kv.*` and `assist.*`
    override them."""

    gpu_blocks: int = MISSING  # of 16 tokens
    host_blocks: int = MISSING
    post_attention_limit: int = 0  # P
    post_layer_limit: int = 0  # F


@dataclass
class ProfileConfig:
    """One model on one machine; `tables` is keyed by the primitives of `CostModel`."""

    name: str = MISSING
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    gpu: GpuProfileConfig = field(default_factory=GpuProfileConfig)
    cpu: CpuProfileConfig = field(default_factory=CpuProfileConfig)
    link: LinkProfileConfig = field(default_factory=LinkProfileConfig)
    assist: AssistProfileConfig = field(default_factory=AssistProfileConfig)
    host: HostProfileConfig = field(default_factory=HostProfileConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    tables: dict[str, TableConfig] = field(default_factory=dict)
