"""The plan: every setting resolved to one value, frozen, the same in every process.

Made once by `settings.resolve`, logged, and handed to engine and workers as JSON. Plain data: no
torch, no defaults, nothing left to decide.
"""

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Self

from dualpace.runtime.step_times import StepTimes

ITEMSIZE = {"bf16": 2, "float32": 4}
"""Bytes of one weight, activation or KV element, by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """What is served, with the shape facts that pools and buffers are sized by."""

    source: str  # for graphs.load.resolve_source
    name: str  # as clients see it
    dtype: str  # bf16 | float32
    seed: int  # of random weights
    max_context: int  # tokens of prompt and output together
    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    eos_token_ids: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Row counts that stages of one device are compiled for: in the layers, and of sampled rows."""

    layers: tuple[int, ...]
    final: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilePlan:
    """Candidates of each device, one or several to be timed; where they are kept."""

    candidates_gpu: tuple[str, ...]
    candidates_cpu: tuple[str, ...]
    buckets_gpu: BucketPlan
    buckets_cpu: BucketPlan
    cache_dir: str  # absolute
    start: str  # tiered | ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """The accelerator worker; `device` cpu is the torch stand-in."""

    device: str  # cpu | cuda
    threads: int  # of one rank
    rank_cores: tuple[tuple[int, ...], ...]
    token_limit: int  # soft
    max_batched_tokens: int  # hard
    max_batch_size: int
    tp: int

    @property
    def cores(self) -> tuple[int, ...]:
        """Of all ranks, each once."""
        return _together(self.rank_cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    threads: int  # of one rank
    rank_cores: tuple[tuple[int, ...], ...]  # each within one NUMA node where known
    max_batch_size: int
    max_waiting: int  # Prefill-to-CPU is admitted only while fewer requests wait
    tp: int
    all_reduce: str  # shared_memory | gloo

    @property
    def cores(self) -> tuple[int, ...]:
        """Of all ranks, each once."""
        return _together(self.rank_cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """Both pools: `gpu_blocks` and `host_blocks` hold requests, as set, logged and counted in
    metrics; the `pool_blocks` are what is allocated, with block 0, the scratch block, besides."""

    gpu_blocks: int
    host_blocks: int
    bytes_per_block: int  # all layers, K and V
    output_estimate: str
    check_moves: bool

    @property
    def gpu_pool_blocks(self) -> int:
        return self.gpu_blocks + 1

    @property
    def host_pool_blocks(self) -> int:
        return self.host_blocks + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistPlan:
    """Equation 5's P and F."""

    post_attention_limit: int
    post_layer_limit: int
    mode: str  # boundary | stream, on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPlan:
    """The policy's registered name and its own settings."""

    name: str
    lockstep: bool  # GPU rounds may carry host rows
    options: tuple[tuple[str, int | float | str | bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    host: str
    port: int
    cores: tuple[int, ...]
    drain_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimePlan:
    round_log: str | None  # absolute
    request_log: str | None  # absolute
    look_ahead: bool
    worker_module: str
    cores: tuple[int, ...]  # of the engine process


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """Which settings a measured profile decided; `note` says it to people."""

    name: str | None = None
    settings: tuple[str, ...] = ()
    note: str = ""
    step_times: StepTimes | None = None  # under its own thresholds

    @property
    def public_name(self) -> str | None:
        """For clients, who learn no folder of one that was named by its path."""
        return self.name and Path(self.name).name.removesuffix(".yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    hw: str
    model: ModelPlan
    compile: CompilePlan
    gpu: GpuPlan
    cpu: CpuPlan
    kv: KvPlan
    assist: AssistPlan
    policy: PolicyPlan
    server: ServerPlan
    runtime: RuntimePlan
    profile: ProfilePlan = ProfilePlan()

    @property
    def times_layers(self) -> bool:
        """Whether workers time a layer's parts when they start: where the policy judges by times
        and no profile has told them."""
        if self.policy.lockstep:
            return True
        by_times = dict(self.policy.options).get("host_admission") == "profile"
        return by_times and self.profile.step_times is None and self.kv.host_blocks > 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that `to_json` wrote; KeyError or TypeError for any other text."""
        return typing.cast(Self, _build(cls, json.loads(text)))

    def lines(self) -> list[str]:
        """One `group: key=value ...` a group, for logs and people."""
        lines = []
        for group, values in asdict(self).items():
            shown = (
                " ".join(f"{k}={_shown(v)}" for k, v in values.items() if not isinstance(v, dict))
                if isinstance(values, dict)
                else str(values)
            )
            lines.append(f"{group}: {shown}")
        return lines


def _shown(value: Any) -> str:
    """As on a command line: null, true, `a,b` for tuples, with runs of numbers as `0-7`, and
    `key=value` for pairs in one."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, tuple):
        return str(value)
    parts: list[str] = []
    last = None
    for item in value:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            parts.append(f"{item[0]}={_shown(item[1])}")
        elif isinstance(item, tuple):
            parts.append(f"({_shown(item)})")
        elif isinstance(item, int) and isinstance(last, int) and item == last + 1:
            parts[-1] = f"{parts[-1].partition('-')[0]}-{item}"
        else:
            parts.append(str(item))
        last = item
    return ",".join(parts) or "none"


def _together(ranks: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(core for cores in ranks for core in cores))


def _build(kind: Any, value: Any) -> Any:
    """`value` as JSON read it, as `kind`: nested dataclasses, and tuples for lists."""
    if is_dataclass(kind):
        return _build_dataclass(kind, value)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if isinstance(value, dict):
            return _build(next(a for a in arguments if is_dataclass(a)), value)
        if not isinstance(value, list):
            return value
        return _build(next(a for a in arguments if typing.get_origin(a) is tuple), value)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_build(arguments[0], item) for item in value)
        return tuple(_build(a, item) for a, item in zip(arguments, value, strict=True))
    return value


def _build_dataclass(kind: Any, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(**{f.name: _build(hints[f.name], values[f.name]) for f in fields(kind)})
