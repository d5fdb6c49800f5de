"""From settings and the probed machine to the plan, once. The only place where `auto` is decided.

Raises ConfigError for what this machine cannot serve. Knows nothing about scheduling or workers.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

from dualpace.block import BLOCK_TOKENS
from dualpace.cpu.topology import CoreMap, core_map
from dualpace.errors import ConfigError
from dualpace.graphs.shard import Shard
from dualpace.graphs.source import resolve_source
from dualpace.graphs.spec import ModelSpec
from dualpace.runtime.config import (
    NEO_LAUNCH_MS,
    AssistConfig,
    GpuConfig,
    NeoPolicyConfig,
    PolicyConfig,
    RuntimeConfig,
    ServerConfig,
)
from dualpace.runtime.plan import (
    AssistPlan,
    CpuPlan,
    GpuPlan,
    KvPlan,
    ModelPlan,
    Plan,
    PolicyPlan,
    RuntimePlan,
    ServerPlan,
)
from dualpace.runtime.schedule.limits import context_limit
from dualpace.runtime.schedule.policies import policy_class
from dualpace.settings.check import check
from dualpace.settings.executables import compile_plan
from dualpace.settings.hardware import GIB, Hardware, probe
from dualpace.settings.machine import fingerprint
from dualpace.settings.measured import settled
from dualpace.settings.paths import log_file
from dualpace.settings.pools import bytes_per_block, pool_blocks
from dualpace.settings.schema import ServeConfig, SystemConfig


def resolve(config: SystemConfig, hardware: Hardware | None = None) -> Plan:
    """The plan for `config` on `hardware` (None: this machine, probed now)."""
    check(config)
    hardware = _claimed(config, hardware or probe())
    device = _device(config.gpu, hardware)
    dtype = _dtype(config.model.dtype, device, hardware)
    source = resolve_source(config.model.source)
    spec = source.spec
    _check_ranks(config, device, spec, hardware)
    node_of = dict(zip(hardware.cores, hardware.numa_nodes, strict=True))
    cores = core_map(hardware.cores, device, node_of, config.cpu.tp, config.gpu.tp)
    gpu_cores = _gpu_cores(config, device, cores)
    gpu_threads = _threads("gpu.threads", config.gpu.threads, gpu_cores)
    cpu_threads = _threads("cpu.threads", config.cpu.threads, cores.cpu_workers)
    here = fingerprint(
        device=device,
        dtype=dtype,
        threads=(gpu_threads, cpu_threads),
        tp=(config.gpu.tp, config.cpu.tp),
        spec=spec,
        hardware=hardware,
    )
    config, profile = settled(config, here)
    token_limit, cpu_rows = config.gpu.token_limit, config.cpu.max_batch_size
    assert token_limit is not None and cpu_rows is not None
    hard_limit = config.gpu.hard_limit(token_limit)
    if config.gpu.max_batch_size > hard_limit:
        raise ConfigError(
            f"gpu.max_batch_size={config.gpu.max_batch_size} is more than the {hard_limit} tokens "
            f"of gpu.max_batched_tokens: lower it, or raise gpu.max_batched_tokens."
        )
    gpu_blocks, host_blocks = pool_blocks(config, hardware, device, spec, dtype)
    return Plan(
        hw=config.hw.name,
        model=ModelPlan(
            source=config.model.source,
            name=config.model.name or source.name,
            dtype=dtype,
            seed=config.model.seed,
            max_context=_max_context(config, spec, gpu_blocks, host_blocks, hard_limit),
            num_layers=spec.num_layers,
            hidden=spec.hidden,
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab=spec.vocab,
            eos_token_ids=spec.eos_token_ids,
        ),
        compile=compile_plan(config, device, dtype, hard_limit, cpu_rows, len(hardware.cores)),
        gpu=GpuPlan(
            device=device,
            threads=gpu_threads,
            rank_cores=gpu_cores,
            token_limit=token_limit,
            max_batched_tokens=hard_limit,
            max_batch_size=config.gpu.max_batch_size,
            tp=config.gpu.tp,
        ),
        cpu=CpuPlan(
            threads=cpu_threads,
            rank_cores=cores.cpu_workers,
            max_batch_size=cpu_rows,
            max_waiting=config.cpu.max_waiting or cpu_rows,
            tp=config.cpu.tp,
            all_reduce=_all_reduce(config.cpu.all_reduce),
        ),
        kv=KvPlan(
            gpu_blocks=gpu_blocks,
            host_blocks=host_blocks,
            bytes_per_block=bytes_per_block(spec, dtype),
            output_estimate=config.kv.output_estimate,
            check_moves=config.kv.check_moves,
        ),
        assist=_assist(config.assist, cpu_rows, config.gpu.tp),
        policy=_policy(config.policy, device),
        server=_server(config.server if isinstance(config, ServeConfig) else ServerConfig(), cores),
        runtime=_runtime(config.runtime, cores),
        profile=profile,
    )


def _claimed(config: SystemConfig, found: Hardware) -> Hardware:
    """`found` cut to what the hw file claims, with a GPU for each rank of `gpu.tp`; ConfigError
    where it claims more than there is."""
    hw = config.hw
    if hw.gpus is not None and hw.gpus > len(found.gpus):
        raise ConfigError(
            f"hw.name={hw.name} states {hw.gpus} GPU{'s' * (hw.gpus > 1)} and this machine shows "
            f"{len(found.gpus) or 'none'}: serve with +hw=cpu, or on a machine that has them."
        )
    if hw.cores is not None and hw.cores > len(found.cores):
        raise ConfigError(
            f"hw.cores={hw.cores} and only {len(found.cores)} cores may be used here: "
            f"set hw.cores={len(found.cores)} or serve without +hw."
        )
    vram = (
        found.gpus
        if hw.vram_gib is None
        else tuple(
            replace(gpu, memory_bytes=min(gpu.memory_bytes, int(hw.vram_gib * GIB)))
            for gpu in found.gpus
        )
    )
    memory = found.memory_bytes
    return Hardware(
        cores=found.cores[: hw.cores],
        numa_nodes=found.numa_nodes[: hw.cores],
        memory_bytes=memory if hw.host_gib is None else min(memory, int(hw.host_gib * GIB)),
        fast_bf16=found.fast_bf16,
        gpus=vram[: max(hw.gpus, config.gpu.tp)] if hw.gpus else vram[: hw.gpus],
    )


def _device(gpu: GpuConfig, hardware: Hardware) -> str:
    if gpu.device == "cuda" and not hardware.gpus:
        raise ConfigError(
            "gpu.device=cuda and no GPU that torch can use is here: set gpu.device=cpu for the "
            "stand-in, or install a CUDA build of torch."
        )
    if gpu.device != "auto":
        return gpu.device
    return "cuda" if hardware.gpus else "cpu"


def _check_ranks(config: SystemConfig, device: str, spec: ModelSpec, hardware: Hardware) -> None:
    """Whether model and machine can be divided among as many ranks."""
    gpus, cores = len(hardware.gpus), len(hardware.cores)
    for key, tp in (("gpu.tp", config.gpu.tp), ("cpu.tp", config.cpu.tp)):
        Shard(0, tp).check(spec, key)
        if key == "gpu.tp" and device == "cuda" and tp > gpus:
            raise ConfigError(
                f"{key}={tp} and this machine shows {gpus} GPU{'s' * (gpus > 1)}: set {key}={gpus}."
            )
        if tp > cores:
            raise ConfigError(
                f"{key}={tp} and only {cores} cores may be used here, one a rank: lower {key}."
            )


def _dtype(dtype: str, device: str, hardware: Hardware) -> str:
    """float32 only where bf16 would be emulated and no GPU shares the KV."""
    if dtype != "auto":
        return dtype
    return "bf16" if device == "cuda" or hardware.fast_bf16 else "float32"


def _max_context(
    config: SystemConfig, spec: ModelSpec, gpu_blocks: int, host_blocks: int, hard_limit: int
) -> int:
    """As set, else the most that the model and the scheduler can do."""
    host_alone = host_blocks if policy_class(config.policy.name).has_cpu_engine else 0
    possible = min(spec.max_context, context_limit(gpu_blocks, host_alone, hard_limit))
    wanted = config.model.max_context
    if wanted is None:
        return possible
    if wanted > spec.max_context:
        raise ConfigError(
            f"model.max_context={wanted} is more than the {spec.max_context} tokens that "
            f"model.source={config.model.source} itself is made for: lower it to at most "
            f"{possible}, or leave it out."
        )
    if wanted > possible:
        raise ConfigError(
            f"model.max_context={wanted} is more than the {possible} tokens that the model "
            f"({spec.max_context}), the GPU pool ({gpu_blocks * BLOCK_TOKENS}) and the host pool "
            f"within gpu.max_batched_tokens ({min(host_alone * BLOCK_TOKENS, hard_limit)}) allow: "
            f"lower it, or raise kv.gpu_blocks."
        )
    return wanted


def _gpu_cores(config: SystemConfig, device: str, cores: CoreMap) -> tuple[tuple[int, ...], ...]:
    """Of each accelerator worker. One stand-in that is asked for more threads than it has cores
    takes the CPU worker's too, where the policy leaves that one without work."""
    wanted, own = config.gpu.threads or 1, cores.gpu_workers
    alone = device == "cpu" and not policy_class(config.policy.name).uses_host
    if not alone or len(own) > 1 or wanted <= len(own[0]):
        return own
    every = (core for rank in (own[0], *cores.cpu_workers) for core in rank)
    return (tuple(dict.fromkeys(every)),)  # a single core is both workers'


def _threads(key: str, wanted: int | None, ranks: Sequence[tuple[int, ...]]) -> int:
    """Of one rank; all have as many."""
    cores = min(map(len, ranks))
    if wanted is not None and wanted > cores:
        raise ConfigError(
            f"{key}={wanted} is above {cores}, the number of that worker's cores: lower it or "
            f"leave it out."
        )
    return wanted or cores


def _all_reduce(wanted: str) -> str:
    return "shared_memory" if wanted == "auto" else wanted


def _assist(config: AssistConfig, largest_batch: int, gpu_ranks: int) -> AssistPlan:
    """Several ranks serve at boundaries: sums over ranks on two streams at once could wait for each
    other.
    """
    p, f = config.post_attention_limit, config.post_layer_limit
    if p is None or f is None:  # Full-CPU for every batch that can be formed
        p, f = largest_batch + 1, largest_batch
    mode = config.mode if gpu_ranks == 1 else "boundary"
    return AssistPlan(post_attention_limit=p, post_layer_limit=f, mode=mode)


def _policy(config: PolicyConfig, device: str) -> PolicyPlan:
    """NEO counts a fixed time for its launches into every CPU attention; the stand-in launches
    nothing."""
    if isinstance(config, NeoPolicyConfig) and config.launch_ms is None and device == "cuda":
        config = replace(config, launch_ms=NEO_LAUNCH_MS)
    given = ((f.name, getattr(config, f.name)) for f in fields(config) if f.name != "name")
    options = tuple((name, value) for name, value in given if value is not None)
    return PolicyPlan(name=config.name, lockstep=config.lockstep, options=options)


def _server(config: ServerConfig, cores: CoreMap) -> ServerPlan:
    return ServerPlan(
        host=config.host,
        port=config.port,
        cores=cores.server,
        drain_timeout_s=config.drain_timeout_s,
    )


def _runtime(config: RuntimeConfig, cores: CoreMap) -> RuntimePlan:
    return RuntimePlan(
        round_log=log_file("runtime.round_log", config.round_log),
        request_log=log_file("runtime.request_log", config.request_log),
        look_ahead=config.look_ahead,
        worker_module=config.worker_module,
        cores=cores.engine,
    )
