"""What a profile is tied to: the fingerprint of a machine and model as the plan uses them, and its
versions. Reads /proc and package metadata, opens no device, imports no torch."""

import importlib.metadata
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dualpace.graphs.spec import ModelSpec
from dualpace.runtime.plan import Plan
from dualpace.settings.hardware import Hardware

Fingerprint = dict[str, Any]

STAND_IN = "none (torch on the CPU)"
# Another minor version of these may run other kernels. Triton and FlashInfer matter on a GPU only.
PACKAGES = {"cpu": ("torch", "numba"), "cuda": ("torch", "numba", "triton", "flashinfer-python")}


def fingerprint(
    *,
    device: str,
    dtype: str,
    threads: tuple[int, int],
    tp: tuple[int, int],
    spec: ModelSpec,
    hardware: Hardware,
) -> Fingerprint:
    """Flat and comparable: two that differ in any key need two profiles. `threads` and `tp` are
    the GPU worker's, then the CPU worker's."""
    return {
        "cpu": cpu_name(),
        "cpu_threads": threads[1],
        "gpu": hardware.gpus[0].name if device == "cuda" else STAND_IN,
        "gpu_threads": threads[0] if device == "cpu" else None,
        "gpu_tp": tp[0],
        "cpu_tp": tp[1],
        "dtype": dtype,
        "model": model_shape(spec),
        **{f"version_{name}": minor_version(name) for name in PACKAGES[device]},
    }


def model_shape(spec: ModelSpec) -> str:
    """The numbers that times depend on."""
    return (
        f"{spec.num_layers} layers, hidden {spec.hidden}, heads {spec.num_q_heads}/"
        f"{spec.num_kv_heads}x{spec.head_dim}, FFN {spec.intermediate}, vocabulary {spec.vocab}"
    )


def differences(measured: Fingerprint, here: Fingerprint) -> list[str]:
    """`key: measured, not here` for each key that differs."""
    keys = [key for key in {**measured, **here} if measured.get(key) != here.get(key)]
    return [
        f"{key.replace('_', ' ')} {measured.get(key)} there, {here.get(key)} here" for key in keys
    ]


def provenance(plan: Plan) -> dict[str, Any]:
    """When and with what a point was measured, for people."""
    names = ("dualpace", *PACKAGES[plan.gpu.device])
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "cpu_cores": list(plan.cpu.cores),
        "gpu_cores": list(plan.gpu.cores),
        "backends_cpu": list(plan.compile.candidates_cpu),
        "backends_gpu": list(plan.compile.candidates_gpu),
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def minor_version(package: str) -> str | None:
    """`2.13` of `2.13.1+cpu`."""
    found = version(package)
    return found and ".".join(found.split("+")[0].split(".")[:2])
