"""What this machine has: cores, free memory under cgroup limits, GPUs. Probes, decides nothing.

Everything is read from /proc, /sys and the CUDA driver, so that asking costs no torch import and
opens no CUDA context.
"""

import ctypes
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from dualpace.cpu.isa import has_bf16
from dualpace.cpu.topology import numa_nodes, usable_cores

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The part of a machine that this process may use."""

    cores: tuple[int, ...]  # logical CPUs
    numa_nodes: tuple[int, ...]  # of each of `cores`
    memory_bytes: int  # that can still be taken
    fast_bf16: bool  # the CPU has bf16 instructions
    gpus: tuple[Gpu, ...]


def probe() -> Hardware:
    cores, node_of = usable_cores(), numa_nodes()
    return Hardware(
        cores=cores,
        numa_nodes=tuple(node_of.get(core, 0) for core in cores),
        memory_bytes=available_memory(),
        fast_bf16=has_bf16(),
        gpus=probe_gpus(),
    )


def available_memory(proc: Path = Path("/proc"), sysfs: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be taken, of the machine and of every cgroup above this process."""
    meminfo = dict(
        line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line
    )
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    return min([free, *(limit - used for limit, used in cgroup_memory(proc, sysfs))])


def cgroup_memory(proc: Path, sysfs: Path) -> list[tuple[int, int]]:
    """(limit, use without reclaimable file cache) in bytes of each limited cgroup, v1 and v2."""
    found = []
    roots: tuple[Path, ...]
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2, alone or beside v1 ("unified")
            roots, names = (sysfs, sysfs / "unified"), ("memory.max", "memory.current")
            cache = "inactive_file"
        elif "memory" in controllers.split(","):
            roots, cache = (sysfs / "memory",), "total_inactive_file"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for root in roots:
            # In a container the path may be the host's: its missing folders are passed over.
            for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
                if folder.is_relative_to(root) and (one := _limit(folder, *names, cache)):
                    found.append(one)
    return found


def _limit(folder: Path, limit_name: str, use_name: str, cache: str) -> tuple[int, int] | None:
    limit, use = _read(folder / limit_name).strip(), _read(folder / use_name).strip()
    if not limit.isdecimal() or not use.isdecimal() or int(limit) >= 1 << 60:  # "max", v1's 2**63
        return None
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return int(limit), max(int(use) - int(stat.get(cache, 0)), 0)


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def probe_gpus() -> tuple[Gpu, ...]:
    """The GPUs that the driver shows to this process, if torch is there to use them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_gpu(driver, i) for i in range(count.value)) if _torch_has_cuda() else ()


def _gpu(driver: ctypes.CDLL, ordinal: int) -> Gpu:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    return Gpu(name=name.value.decode(), memory_bytes=total.value)


def _torch_has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.version.cuda is not None
