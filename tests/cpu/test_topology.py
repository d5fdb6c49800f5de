"""Usable cores and the core map, on made-up /proc and /sys trees."""

from pathlib import Path

import pytest

from dualpace.cpu.topology import (
    allowed_cpus,
    core_map,
    cpu_quota,
    format_cpus,
    huge_pages,
    numa_nodes,
    parse_cpus,
    usable_cores,
)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def machine(root: Path, allowed: str, threads_per_core: int = 1, cpus: int = 16) -> Path:
    files = {"proc/self/status": f"Name:\tx\nCpus_allowed_list:\t{allowed}"}
    for cpu in range(cpus):
        cores = cpus // threads_per_core
        together = ",".join(str(cpu % cores + cores * t) for t in range(threads_per_core))
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = together
    return tree(root, files)


def test_affinity_alone(tmp_path: Path) -> None:
    assert usable_cores(machine(tmp_path, "2-5,9")) == (2, 3, 4, 5, 9)


def test_sibling_threads_are_left_out(tmp_path: Path) -> None:
    assert usable_cores(machine(tmp_path, "0-15", threads_per_core=2)) == tuple(range(8))


def test_siblings_count_where_cores_are_few(tmp_path: Path) -> None:
    assert usable_cores(machine(tmp_path, "0-3", threads_per_core=2, cpus=4)) == (0, 1, 2, 3)


def test_cgroup_v2_cpuset_and_quota_of_an_ancestor(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-15")
    tree(
        root,
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/cpuset.cpus.effective": "4-11",
            "sys/fs/cgroup/a/cpu.max": "350000 100000",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        },
    )
    assert allowed_cpus(root) == tuple(range(4, 12))
    assert cpu_quota(root) == 3.5
    assert usable_cores(root) == (4, 5, 6)


def test_cgroup_v1_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-15")
    tree(
        root,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:cpuset:/docker/abc\n0::/",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpuset/cpuset.cpus": "8-15",
        },
    )
    assert usable_cores(root) == (8, 9)


def test_unlimited_v1_quota(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-3")
    tree(
        root,
        {
            "proc/self/cgroup": "1:cpu:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert cpu_quota(root) is None


def test_tiny_quota_leaves_one_core(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-3")
    tree(root, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"})
    assert usable_cores(root) == (0,)


def test_numa_nodes_and_huge_pages(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-1",
            "sys/devices/system/node/node1/cpulist": "2-3",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        },
    )
    assert numa_nodes(tmp_path) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert huge_pages(tmp_path) == {"anonymous": "madvise", "shared": ""}


def test_this_machine_has_cores() -> None:
    assert usable_cores()


@pytest.mark.parametrize("text", ["0", "0-3", "1,3,5", "0-2,7-8"])
def test_cpu_lists_round_trip(text: str) -> None:
    assert format_cpus(parse_cpus(text)) == text


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16, 64])
def test_workers_own_their_cores(n: int, device: str) -> None:
    cores = core_map(range(n), device)
    [gpu], [cpu] = cores.gpu_workers, cores.cpu_workers
    assert gpu and cpu and cores.engine and cores.server
    assert not set(gpu) & set(cpu)
    if n < 4:
        assert len(gpu) == len(cpu) == 1
    if n >= 4:
        assert not {*cores.engine, *cores.server} & {*gpu, *cpu}
    if n >= 8:
        assert len(cores.engine) == len(cores.server) == 1
        assert cores.engine != cores.server
        assert len(gpu) + len(cpu) + 2 == n
        assert device == "cpu" or len(gpu) == 1


def test_one_core_is_shared_by_all() -> None:
    cores = core_map([5])
    assert cores.server == cores.engine == (5,)
    assert cores.gpu_workers == cores.cpu_workers == ((5,),)


def test_ranks_stay_within_numa_nodes() -> None:
    node_of = {core: core // 16 for core in range(32)}
    cores = core_map(range(32), "cuda", node_of, num_cpu_workers=2)
    assert [{node_of[c] for c in rank} for rank in cores.cpu_workers] == [{0}, {1}]
    assert [len(rank) for rank in cores.cpu_workers] == [15, 14]
    one = core_map(range(32), "cuda", node_of)
    assert {node_of[c] for c in one.cpu_workers[0]} == {0}
    assert {node_of[c] for c in (*one.server, *one.engine, *one.gpu_workers[0])} == {1}


def test_ranks_have_cores_of_their_own_as_far_as_they_go() -> None:
    two = core_map(range(2), "cpu", None, num_cpu_workers=2, num_gpu_workers=2)
    assert two.gpu_workers == two.cpu_workers == ((0,), (1,))
    for device, gpu_cores in (("cpu", 3), ("cuda", 1)):
        cores = core_map(range(16), device, None, num_cpu_workers=2, num_gpu_workers=2)
        ranks = (*cores.gpu_workers, *cores.cpu_workers)
        assert [len(rank) for rank in cores.gpu_workers] == [gpu_cores] * 2
        assert len({core for rank in ranks for core in rank}) == sum(map(len, ranks))
    six = core_map(range(6), "cpu", None, num_cpu_workers=2, num_gpu_workers=3)
    assert len({*six.gpu_workers, *six.cpu_workers}) == 5


def test_more_ranks_than_nodes_share_them_evenly() -> None:
    ranks = core_map(range(19), "cuda", None, num_cpu_workers=2).cpu_workers
    assert [len(rank) for rank in ranks] == [8, 8]
    assert not set(ranks[0]) & set(ranks[1])
