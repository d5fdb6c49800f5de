"""Free memory under cgroup limits, read from made-up /proc and /sys trees."""

from pathlib import Path

from dualpace.settings.hardware import available_memory, cgroup_memory, probe

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in {"proc/meminfo": f"MemAvailable: {8 * GIB // 1024} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "sys"


def test_without_limits_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    places = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/memory.max": "max\n",
            "sys/memory.current": "123\n",
            "sys/memory.stat": "",
        },
    )
    assert cgroup_memory(*places) == []
    assert available_memory(*places) == 8 * GIB


def test_v2_takes_the_tightest_of_a_cgroup_and_those_above(tmp_path: Path) -> None:
    places = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/slice/job/memory.max": f"{6 * GIB}\n",
            "sys/slice/job/memory.current": f"{1 * GIB}\n",
            "sys/slice/job/memory.stat": "inactive_file 0\n",
            "sys/slice/memory.max": f"{5 * GIB}\n",
            "sys/slice/memory.current": f"{3 * GIB}\n",
            "sys/slice/memory.stat": f"anon 7\ninactive_file {1 * GIB}\n",
        },
    )
    assert available_memory(*places) == 3 * GIB  # 5 - (3 - 1 of reclaimable cache)


def test_v1_limits_count_and_its_unlimited_value_does_not(tmp_path: Path) -> None:
    places = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n1:cpu:/\n",
            "sys/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/memory/box/memory.usage_in_bytes": f"{GIB // 2}\n",
            "sys/memory/box/memory.stat": "total_inactive_file 0\n",
            "sys/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/memory/memory.usage_in_bytes": "0\n",
            "sys/memory/memory.stat": "",
        },
    )
    assert available_memory(*places) == 3 * GIB // 2


def test_in_a_container_the_path_of_the_host_is_passed_over(tmp_path: Path) -> None:
    places = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/0123\n",
            "sys/memory.max": f"{4 * GIB}\n",
            "sys/memory.current": "0\n",
            "sys/memory.stat": "",
        },
    )
    assert available_memory(*places) == 4 * GIB


def test_this_machine_can_be_probed() -> None:
    found = probe()
    assert len(found.cores) == len(found.numa_nodes) >= 1
    assert found.memory_bytes > 0
