"""Which cores this process may use and which process of the server gets which.

Read from /proc and /sys below a root folder (tests pass a made-up one): affinity, cpusets and CPU
quotas of cgroup v1 and v2, sibling threads, NUMA nodes. This file knows nothing about threads,
tensors or what the processes do.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_FEW = 4  # below this many physical cores, sibling threads count as cores
_MANY = 8  # from this many on, the GPU worker's loop, the engine and the server have one core each


@dataclass(frozen=True, slots=True)
class CoreMap:
    """Logical CPUs of each process. Sets may overlap where there are too few cores."""

    server: tuple[int, ...]
    engine: tuple[int, ...]
    gpu_workers: tuple[tuple[int, ...], ...]  # one a rank
    cpu_workers: tuple[tuple[int, ...], ...]  # one a rank, each within one NUMA node where known

    def __str__(self) -> str:
        named = {"server": self.server, "engine": self.engine}
        for worker, ranks in (("GPU worker", self.gpu_workers), ("CPU worker", self.cpu_workers)):
            for rank, cores in enumerate(ranks):
                named[worker if len(ranks) == 1 else f"{worker} {rank}"] = cores
        return ", ".join(f"{name}: {format_cpus(cores)}" for name, cores in named.items())


def core_map(
    cores: Sequence[int],
    device: str = "cuda",
    node_of: Mapping[int, int] | None = None,
    num_cpu_workers: int = 1,
    num_gpu_workers: int = 1,
) -> CoreMap:
    """Divide `cores` among the processes.

    device           of the accelerator workers: "cuda" needs one core a rank for its loop, "cpu"
                     computes and gets half
    node_of          NUMA node of each core; None: all on one node
    num_cpu_workers  ranks of the CPU engine; with more ranks than nodes, nodes are divided evenly;
                     the other processes' cores then come from all nodes, for ranks wait for the
                     smallest
    num_gpu_workers  ranks of the GPU engine
    Fewer than 4 cores: each worker has one of its own as far as they go, engine and server what
    is left or all.
    """
    if not cores or min(num_cpu_workers, num_gpu_workers) < 1:
        raise ValueError("a core map needs at least one core and one worker a side")
    by_node = _by_node(cores, node_of or {})
    ordered = [core for node in by_node for core in node]
    n = len(ordered)
    if n < _FEW:
        workers = [(ordered[i % n],) for i in range(num_gpu_workers + num_cpu_workers)]
        rest = tuple(ordered[num_gpu_workers + num_cpu_workers :]) or tuple(ordered)
        return CoreMap(
            rest, rest, tuple(workers[:num_gpu_workers]), tuple(workers[num_gpu_workers:])
        )
    tail = 2 if n >= _MANY else 1
    num_gpu = num_gpu_workers if device != "cpu" else max(num_gpu_workers, (n - tail) // 2)
    num_gpu = max(1, min(num_gpu, n - tail - num_cpu_workers))
    if num_cpu_workers > 1:
        ordered = _others_last(by_node, num_gpu + tail)
    server, engine, compute = ordered[-1], ordered[-tail], ordered[:-tail]
    gpu, compute = compute[len(compute) - num_gpu :], compute[: len(compute) - num_gpu]
    return CoreMap(
        (server,),
        (engine,),
        _ranks([gpu], gpu, num_gpu_workers),
        _ranks(by_node, compute, num_cpu_workers),
    )


def _others_last(by_node: list[list[int]], count: int) -> list[int]:
    """All cores by node, but for `count` of them, from whichever node has most left, at the end."""
    nodes, others = [list(node) for node in by_node], list[int]()
    for _ in range(count):
        others.insert(0, max(reversed(nodes), key=len).pop())
    return [core for node in nodes for core in node] + others


def shares(
    cores: Sequence[int], node_of: Mapping[int, int], num_ranks: int
) -> tuple[tuple[int, ...], ...]:
    """All of `cores` for one rank; for several, parts that cross no node border."""
    by_node = _by_node(cores, node_of)
    if num_ranks == 1:
        return (tuple(cores),)
    return _ranks(by_node, [core for node in by_node for core in node], num_ranks)


def _by_node(cores: Sequence[int], node_of: Mapping[int, int]) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for core in cores:
        nodes.setdefault(node_of.get(core, 0), []).append(core)
    return sorted(nodes.values(), key=len, reverse=True)


def _ranks(
    by_node: list[list[int]], compute: list[int], num_ranks: int
) -> tuple[tuple[int, ...], ...]:
    """`compute` cut into ranks that cross no node border: rank r lies on node r mod nodes."""
    nodes = [[core for core in node if core in set(compute)] for node in by_node]
    nodes = [node for node in nodes if node]
    ranks = []
    for rank in range(num_ranks):
        node = nodes[rank % len(nodes)]
        sharing = len(range(rank % len(nodes), num_ranks, len(nodes)))
        place, size = rank // len(nodes), max(1, len(node) // sharing)
        ranks.append(tuple(node[place * size : (place + 1) * size] or node[-1:]))
    return tuple(ranks)


def usable_cores(root: Path = _ROOT) -> tuple[int, ...]:
    """One logical CPU of each physical core that this process may use, at most as many as its CPU
    quota allows.

    With fewer than 4 physical cores, sibling threads count as cores: a worker with half a core
    beats one without.
    """
    cpus = allowed_cpus(root)
    first: dict[tuple[int, ...], int] = {}
    for cpu in cpus:
        first.setdefault(siblings(cpu, root), cpu)
    chosen = list(first.values())
    if len(chosen) < _FEW:
        chosen += [cpu for cpu in cpus if cpu not in chosen]
    quota = cpu_quota(root)
    limit = len(chosen) if quota is None else max(1, math.floor(quota))
    return tuple(chosen[:limit])


def allowed_cpus(root: Path = _ROOT) -> tuple[int, ...]:
    """Logical CPUs in the affinity of this process and in every cpuset above it, ascending."""
    cpus = _affinity(root)
    for folder in _cgroup_folders("cpuset", root):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if text := _read(folder / name):
                cpus &= set(parse_cpus(text))
                break
    return tuple(sorted(cpus))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that the cgroups above this process allow; None without a limit."""
    quotas = []
    for folder in _cgroup_folders("cpu", root):
        text = _read(folder / "cpu.max")  # v2
        if not text:  # v1
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            text = f"{quota} {period}" if quota and period else ""
        fields = text.split()
        if len(fields) == 2 and fields[0].isdecimal():  # neither "max" nor v1's -1
            quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas, default=None)


def siblings(cpu: int, root: Path = _ROOT) -> tuple[int, ...]:
    """Logical CPUs that share a physical core with `cpu`, itself included."""
    text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return parse_cpus(text) or (cpu,)


def numa_nodes(root: Path = _ROOT) -> dict[int, int]:
    """NUMA node of each logical CPU; empty where the machine does not say."""
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in parse_cpus(_read(folder / "cpulist")):
            nodes[cpu] = int(folder.name.removeprefix("node"))
    return nodes


def huge_pages(root: Path = _ROOT) -> dict[str, str]:
    """The chosen mode of transparent huge pages for "anonymous" and for "shared" memory, "" where
    unknown.
    """
    modes = {}
    for kind, name in (("anonymous", "enabled"), ("shared", "shmem_enabled")):
        text = _read(root / "sys/kernel/mm/transparent_hugepage" / name)
        modes[kind] = text.partition("[")[2].partition("]")[0]
    return modes


def parse_cpus(text: str) -> tuple[int, ...]:
    """CPUs of a kernel list such as `0-3,8`."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            cpus.extend(range(int(low), int(high or low) + 1))
    return tuple(cpus)


def format_cpus(cpus: Sequence[int]) -> str:
    """The shortest kernel list of `cpus`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


def _affinity(root: Path) -> set[int]:
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return set(parse_cpus(line.partition(":")[2]))
    raise RuntimeError(f"{root / 'proc/self/status'} does not say which CPUs are allowed")


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """Existing folders of the cgroup of this process and of those above it, in every hierarchy
    with `controller`.
    """
    base = root / "sys/fs/cgroup"
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [base, base / "unified"]
        elif controller in controllers.split(","):
            mounts = [base / controllers, base / controller]
        else:
            continue
        for mount in dict.fromkeys(mounts):
            # In a container the path may be the host's: folders that are not here are passed over.
            leaf = mount / path.lstrip("/")
            found += [f for f in (leaf, *leaf.parents) if f.is_relative_to(mount) and f.is_dir()]
    return found


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
