"""Refuses settings that could never work on any machine; what depends on the machine is refused by
`resolve`."""

import math
import os
import re
from dataclasses import asdict, fields

from omegaconf import MISSING

from dualpace.cpu.config import ALL_REDUCES
from dualpace.errors import ConfigError
from dualpace.graphs.config import BACKENDS, DTYPES, STARTS
from dualpace.runtime.bench.config import FIGURES, LoadConfig
from dualpace.runtime.config import (
    ASSIST_MODES,
    DEVICES,
    HOST_ADMISSIONS,
    OUTPUT_ESTIMATES,
    AssistConfig,
    DualPacePolicyConfig,
    KvConfig,
    NeoPolicyConfig,
    ServerConfig,
)
from dualpace.runtime.simulate.config import ProfileConfig
from dualpace.settings.paths import check_output, file_name, folder
from dualpace.settings.schema import BenchConfig, ServeConfig, SimulateConfig, SystemConfig

# Groups and settings about machines and models that are there.
_NOT_SIMULATED = (
    *("hw", "model", "compile", "gpu.device", "gpu.threads", "gpu.tp", "cpu.threads"),
    *("cpu.all_reduce", "kv.check_moves", "runtime.worker_module"),
)
# Of a simulated machine: what sizes are divided by, and what multiplies all of them.
_DIVISORS = ("gb_s", "efficiency", "tflops", "tp", "beside_stretch")


def check(config: SystemConfig) -> None:
    """Raises ConfigError for values that no machine could serve."""
    _one_of("model.dtype", config.model.dtype, DTYPES)
    _one_of("gpu.device", config.gpu.device, DEVICES)
    _one_of("cpu.all_reduce", config.cpu.all_reduce, ALL_REDUCES)
    _one_of("assist.mode", config.assist.mode, ASSIST_MODES)
    if isinstance(config.policy, DualPacePolicyConfig):
        _one_of("policy.host_admission", config.policy.host_admission, HOST_ADMISSIONS)
        if config.policy.migrate_every < 0:
            raise ConfigError(
                f"policy.migrate_every={config.policy.migrate_every} is negative: set the tokens "
                f"after which a request leaves HBM, or 0 for none."
            )
    if isinstance(config.policy, NeoPolicyConfig) and config.policy.launch_ms is not None:
        _at_least_0("policy.launch_ms", config.policy.launch_ms)
    _one_of("kv.output_estimate", config.kv.output_estimate, OUTPUT_ESTIMATES)
    _one_of("compile.backend", config.compile.backend, BACKENDS)
    _one_of("compile.start", config.compile.start, STARTS)
    for key in ("backend_gpu", "backend_cpu"):
        if (backend := getattr(config.compile, key)) is not None:
            _one_of(f"compile.{key}", backend, BACKENDS)
    _check_names(config)
    _finite(config)
    _positive(config)
    _check_limits(config)
    _check_thresholds(config.assist)
    _check_pools(config.kv)
    if isinstance(config, ServeConfig):
        _check_server(config.server)
    if isinstance(config, BenchConfig):
        _check_load(config)
    if isinstance(config, SimulateConfig):
        _check_simulation(config)


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value} is unknown: choose one of {', '.join(allowed)}.")


def _check_simulation(config: SimulateConfig) -> None:
    for place in _NOT_SIMULATED:
        group, _, name = place.partition(".")
        part = getattr(config, group)
        for field in fields(part):
            value = getattr(part, field.name)
            if name in ("", field.name) and value != field.default:
                raise ConfigError(
                    f"{group}.{field.name}={value} has no effect on a simulation: choose its "
                    f"machine and model with simulated=NAME."
                )
    window = config.window
    if window is not None and (len(window) != 2 or not 0 <= window[0] < window[1]):
        raise ConfigError(
            f"window={window} is no time from and to: write it in seconds, as window=[8,25]."
        )
    _check_simulated(config.simulated)


def _check_simulated(machine: ProfileConfig) -> None:
    """Its times are sizes divided by rates: neither may be 0, and no part less."""
    for group in ("shape", "gpu", "cpu", "link", "assist", "host", "limits"):
        for name, value in asdict(getattr(machine, group)).items():
            if value is None:
                continue
            key = f"simulated.{group}.{name}"
            _at_least_0(key, value)
            if value == 0 and (group == "shape" or name.endswith(_DIVISORS)):
                raise ConfigError(f"{key}=0 is nothing to compute with: set it above 0.")


def _at_least_0(key: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{key}={value:g} is no number from 0 on: set one, or leave it out.")


def _check_names(config: SystemConfig) -> None:
    """Names that are chosen otherwise, and those that may not be empty."""
    for group, part in (("policy", config.policy), ("workload", getattr(config, "workload", None))):
        made_for = next((f.default for f in fields(part) if f.name == "name"), None) if part else ""
        if part and made_for != MISSING and part.name != made_for:
            raise ConfigError(
                f"{group}.name={part.name} cannot be set by itself: choose {group}={part.name}, "
                f"which brings its settings along."
            )
    if not config.model.source:
        raise ConfigError(
            "model.source is empty: name a folder, a .gguf file, smollm2 or random:SHAPE."
        )
    if config.model.name == "":
        raise ConfigError("model.name is empty: name the model for clients, or leave it out.")
    if isinstance(config, ServeConfig) and not config.server.host:
        raise ConfigError("server.host is empty: use 127.0.0.1, or 0.0.0.0 for all addresses.")
    logs = config.runtime.round_log, config.runtime.request_log
    if None not in logs and len({os.path.abspath(log or "") for log in logs}) == 1:
        raise ConfigError(
            f"runtime.round_log and runtime.request_log both name {logs[0]}: name two files."
        )
    if not 0 <= config.model.seed < 2**63:
        raise ConfigError(f"model.seed={config.model.seed} is no seed: use 0 to {2**63 - 1}.")


def _finite(config: SystemConfig) -> None:
    values = {
        "kv.gpu_gib": config.kv.gpu_gib,
        "kv.host_gib": config.kv.host_gib,
        "hw.host_gib": config.hw.host_gib,
        "hw.vram_gib": config.hw.vram_gib,
    }
    if isinstance(config, ServeConfig):
        values["server.drain_timeout_s"] = config.server.drain_timeout_s
    for key, value in values.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{key}={value} is no finite number: set one, or leave it out.")


def _positive(config: SystemConfig) -> None:
    values = {
        "hw.cores": config.hw.cores,
        "model.max_context": config.model.max_context,
        "gpu.threads": config.gpu.threads,
        "gpu.token_limit": config.gpu.token_limit,
        "gpu.max_batched_tokens": config.gpu.max_batched_tokens,
        "gpu.max_batch_size": config.gpu.max_batch_size,
        "gpu.tp": config.gpu.tp,
        "cpu.threads": config.cpu.threads,
        "cpu.max_batch_size": config.cpu.max_batch_size,
        "cpu.max_waiting": config.cpu.max_waiting,
        "cpu.tp": config.cpu.tp,
        "kv.gpu_blocks": config.kv.gpu_blocks,
    }
    for key, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{key}={value} is below 1: set it to at least 1 or leave it out.")
    sizes = {
        "kv.gpu_gib": config.kv.gpu_gib,
        "hw.host_gib": config.hw.host_gib,
        "hw.vram_gib": config.hw.vram_gib,
    }
    for key, size in sizes.items():
        if size is not None and not size > 0:
            raise ConfigError(f"{key}={size} is not above 0: raise it or leave it out.")
    if config.hw.gpus is not None and config.hw.gpus < 0:
        raise ConfigError(f"hw.gpus={config.hw.gpus} is negative: 0 means to use none.")
    if config.model.max_context == 1:
        raise ConfigError("model.max_context=1 holds no prompt with its answer: set at least 2.")
    if config.compile.buckets is not None and not config.compile.buckets:
        raise ConfigError("compile.buckets=[] lists no row counts: name some or leave it out.")
    for index, bucket in enumerate(config.compile.buckets or ()):
        if bucket < 1:
            raise ConfigError(f"compile.buckets[{index}]={bucket} is below 1: list row counts.")


def _check_limits(config: SystemConfig) -> None:
    gpu = config.gpu
    hard = gpu.max_batched_tokens
    if hard is not None and gpu.token_limit is not None and hard < gpu.token_limit:
        raise ConfigError(
            f"gpu.max_batched_tokens={hard} is below gpu.token_limit={gpu.token_limit}: "
            f"raise the first or lower the second."
        )
    if hard is not None and hard < gpu.max_batch_size:
        raise ConfigError(
            f"gpu.max_batched_tokens={hard} is below gpu.max_batch_size={gpu.max_batch_size}, "
            f"the rows of one decode round: lower gpu.max_batch_size to {hard}."
        )


def _check_thresholds(assist: AssistConfig) -> None:
    p, f = assist.post_attention_limit, assist.post_layer_limit
    if (p is None) != (f is None):
        key, other = "post_attention_limit", "post_layer_limit"
        if p is None:
            key, other = other, key
        raise ConfigError(f"assist.{key} is set without assist.{other}: set both or neither.")
    if p is not None and f is not None and (p, f) != (0, 0) and not 0 <= f < p:
        raise ConfigError(
            f"assist.post_attention_limit={p} and assist.post_layer_limit={f} are no legal pair: "
            f"use 0 and 0, or a post_layer_limit from 0 to below post_attention_limit."
        )


def _check_pools(kv: KvConfig) -> None:
    for tier in ("gpu", "host"):
        blocks, gib = getattr(kv, f"{tier}_blocks"), getattr(kv, f"{tier}_gib")
        if blocks is not None and gib is not None:
            raise ConfigError(
                f"kv.{tier}_blocks={blocks} and kv.{tier}_gib={gib} both size one pool: set one."
            )
    for key, value in (("host_blocks", kv.host_blocks), ("host_gib", kv.host_gib)):
        if value is not None and value < 0:
            raise ConfigError(f"kv.{key}={value} is negative: 0 means no host tier.")


def _check_server(server: ServerConfig) -> None:
    if not 0 <= server.port <= 65535:
        raise ConfigError(
            f"server.port={server.port} is no TCP port: use 1 to 65535, or 0 for any free one."
        )
    if server.drain_timeout_s < 0:
        raise ConfigError(
            f"server.drain_timeout_s={server.drain_timeout_s} is negative: use 0 to drop at once."
        )


def _check_load(config: BenchConfig) -> None:
    load = config.bench
    if load.url is not None and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", load.url):
        raise ConfigError(
            f"bench.url={load.url} is no address of a server: write it as http://HOST:PORT."
        )
    for key in ("concurrency", "timeout_s", "start_timeout_s", "ramp_from"):
        value = getattr(load, key)
        if value is not None and not value > 0:
            raise ConfigError(f"bench.{key}={value} is not above 0: raise it or leave it out.")
    for key, target in asdict(load.goodput).items():
        if target is not None and not target > 0:
            raise ConfigError(f"bench.goodput.{key}={target:g} is not above 0 ms: raise it.")
    for key in ("warmup", "client_cores"):
        _at_least_0(f"bench.{key}", getattr(load, key) or 0)
    for percentile in load.percentiles:
        if not 0 <= percentile <= 100:
            raise ConfigError(f"bench.percentiles has {percentile:g}: use numbers from 0 to 100.")
    if unknown := set(load.figures) - {*FIGURES}:
        raise ConfigError(
            f"bench.figures has {min(unknown)}: choose of {', '.join(map(str, FIGURES))}."
        )
    if load.concurrency is not None and load.ramp_from is not None:
        raise ConfigError(
            f"bench.concurrency={load.concurrency} is a closed loop, which has no rate for "
            f"bench.ramp_from={load.ramp_from}: set one of them."
        )
    for key, value in (("result", config.result), ("bench.records", load.records)):
        if value is not None and len(load.rates) > 1:
            raise ConfigError(
                f"{key}={value} is one file and bench.rates asks for {len(load.rates)} runs: name "
                f"a folder with bench.out, or sweep workload.rate with --multirun."
            )
    check_output("result", config.result)
    for key in ("records", "server_log"):
        check_output(f"bench.{key}", getattr(load, key))
    folder("bench.out", load.out)
    file_name("bench.page", load.page)
    _check_company(load)
    if load.vocab < 2:
        raise ConfigError(f"bench.vocab={load.vocab} is below 2: prompts need ids to choose from.")


def _check_company(load: LoadConfig) -> None:
    """ConfigError for settings that say something about another, which is not set."""
    needs = {"figures": "out", "page": "out", "resume": "out", "peer_command": "peer"}
    needs["peer_args"] = "peer"
    for key, other in needs.items():
        value = getattr(load, key)
        if value and getattr(load, other) is None:
            raise ConfigError(f"bench.{key} has no effect without bench.{other}: set it, too.")
