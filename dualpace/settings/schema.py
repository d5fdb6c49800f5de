"""Roots of configuration: each entry point's settings, composed of the schemas that the components
own in their `config.py`. Plain data; knows neither Hydra nor the machine.
"""

from dataclasses import dataclass, field

from omegaconf import MISSING

from dualpace.cpu.config import CpuConfig
from dualpace.graphs.config import CompileConfig, ModelConfig
from dualpace.runtime.bench.config import (
    AzureWorkloadConfig,
    FixedWorkloadConfig,
    LoadConfig,
    LognormalWorkloadConfig,
    PlotConfig,
    ShareGptWorkloadConfig,
    WorkloadConfig,
)
from dualpace.runtime.config import (
    AssistConfig,
    DualPacePolicyConfig,
    GpuConfig,
    GpuOnlyPolicyConfig,
    HwConfig,
    KvConfig,
    NeoPolicyConfig,
    PolicyConfig,
    RuntimeConfig,
    ServerConfig,
)
from dualpace.runtime.profile.config import SweepConfig
from dualpace.runtime.simulate.config import ProfileConfig


@dataclass(slots=True, kw_only=True)
class SystemConfig:
    """What every entry point that schedules has in common."""

    hw: HwConfig = field(default_factory=HwConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicyConfig = MISSING
    compile: CompileConfig = field(default_factory=CompileConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    assist: AssistConfig = field(default_factory=AssistConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


@dataclass(slots=True, kw_only=True)
class ServeConfig(SystemConfig):
    """Root of serve.yaml."""

    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(slots=True, kw_only=True)
class SimulateConfig(SystemConfig):
    """Root of simulate.yaml. `simulated` is machine and model; `hw` and `model` play no part."""

    workload: WorkloadConfig = MISSING
    simulated: ProfileConfig = MISSING
    window: list[float] | None = None  # seconds from and to: rates of that time as well
    variant: str | None = None  # label of a run that differs from its policy's plain one
    result: str | None = None  # file for the result as JSON


@dataclass(slots=True, kw_only=True)
class BenchConfig(ServeConfig):
    """Root of bench.yaml. All but `bench`, `workload` and the last three is for a server that the
    run starts."""

    workload: WorkloadConfig = MISSING
    bench: LoadConfig = field(default_factory=LoadConfig)
    variant: str | None = None  # label of a run that differs from its policy's plain one
    result: str | None = None  # file for the result as JSON; None: in bench.out, if that is set


@dataclass(slots=True, kw_only=True)
class ProfileHwConfig(SystemConfig):
    """Root of profile_hw.yaml."""

    profile: SweepConfig = field(default_factory=SweepConfig)


# Root schemas by the name that the primary YAML files list first, and schemas of group variants.
ROOTS: dict[str, type] = {
    "serve_schema": ServeConfig,
    "simulate_schema": SimulateConfig,
    "bench_schema": BenchConfig,
    "plot_schema": PlotConfig,
    "profile_hw_schema": ProfileHwConfig,
}
VARIANTS: dict[tuple[str, str], type] = {
    ("policy", "dualpace_schema"): DualPacePolicyConfig,
    ("policy", "gpu_only_schema"): GpuOnlyPolicyConfig,
    ("policy", "neo_schema"): NeoPolicyConfig,
    ("workload", "workload_azure_schema"): AzureWorkloadConfig,
    ("workload", "workload_sharegpt_schema"): ShareGptWorkloadConfig,
    ("workload", "workload_fixed_schema"): FixedWorkloadConfig,
    ("workload", "workload_lognormal_schema"): LognormalWorkloadConfig,
    ("simulated", "simulated_schema"): ProfileConfig,
}
