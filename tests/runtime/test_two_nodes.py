"""A host of two NUMA nodes, made up as files: each CPU rank has the cores of one, and its part of
what processes share is taken there."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from dualpace import doctor
from dualpace.cpu.topology import numa_nodes, usable_cores
from dualpace.runtime import shared_memory
from dualpace.runtime.plan import Plan
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wiring import assist_stretches, host_pool_stretches, host_shard_bytes
from dualpace.settings.hardware import GIB, Gpu, Hardware
from dualpace.settings.resolve import resolve
from tests.tiny_settings import settings

NODES = {0: "0-11,24-35", 1: "12-23,36-47"}  # 12 cores of two threads each


@pytest.fixture
def host(tmp_path: Path) -> Hardware:
    files = {"proc/self/status": "Cpus_allowed_list:\t0-47"}
    for node, cpus in NODES.items():
        files[f"sys/devices/system/node/node{node}/cpulist"] = cpus
    for cpu in range(48):
        name = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        files[name] = f"{cpu % 24},{cpu % 24 + 24}"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    cores, node_of = usable_cores(tmp_path), numa_nodes(tmp_path)
    return Hardware(
        cores=cores,
        numa_nodes=tuple(node_of[core] for core in cores),
        memory_bytes=64 * GIB,
        fast_bf16=True,
        gpus=(Gpu(name="RTX 4090", memory_bytes=24 * GIB),),
    )


def plan(host: Hardware, ranks: int) -> Plan:
    return resolve(settings(f"cpu.tp={ranks}", "kv.host_blocks=100"), host)


def test_each_rank_has_the_cores_of_one_node(host: Hardware) -> None:
    one, two = plan(host, 1), plan(host, 2)
    assert host.cores == tuple(range(24)), "one thread of each core"
    first, second = two.cpu.rank_cores
    assert first == tuple(range(11)) and second == tuple(range(12, 22))
    assert two.cpu.threads == 10, "server, engine and the GPU worker have cores of either node"
    assert one.cpu.rank_cores == (tuple(range(12)),)


def test_each_ranks_memory_is_taken_on_its_node(
    host: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = plan(host, 2)
    part, (first, second) = host_shard_bytes(two), two.cpu.rank_cores
    assert host_pool_stretches(two) == [(part, first), (part, second)]
    assert [cores for _, cores in assist_stretches(two)] == [(), first, second]
    assert host_pool_stretches(plan(host, 1)) == assist_stretches(plan(host, 1)) == []

    where: set[int] = {99}  # the cores that this thread may use
    taken: list[tuple[int, int, set[int]]] = []

    def move(_: int, cores: Sequence[int]) -> None:
        where.clear()
        where.update(cores)

    def reserve(_: int, start: int, end: int) -> bool:
        taken.append((start, end, set(where)))
        return True

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(where))
    monkeypatch.setattr(os, "sched_setaffinity", move)
    monkeypatch.setattr(shared_memory, "_reserve", reserve)
    near = host_pool_stretches(two)
    SharedRegion.create("pool", 2 * part, lambda: 1 << 40, near=near).close()
    assert taken == [(0, part, set(first)), (part, 2 * part, set(second))]
    assert where == {99}, "and back"


def test_doctor_shows_where_each_rank_is(host: Hardware) -> None:
    ranks = doctor._ranks(plan(host, 2), host)
    assert ranks is not None
    assert ranks["cpu 0"].startswith("cores 0-10 (node 0), 0.0")
    assert ranks["cpu 1"].startswith("cores 12-21 (node 1), 0.0")
    assert ranks["gpu 0"] == "cores 22 (node 1), cuda:0"
