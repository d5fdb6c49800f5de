"""One OpenMP pool: found where torch loaded it, pinned, and shared by torch and the kernels."""

import os
import subprocess
import sys
import threading

import pytest

from dualpace.cpu.openmp import each_thread, runtimes, torch_runtime


def test_runtimes_are_read_from_the_map() -> None:
    maps = """\
7f00-7f01 r-xp 00000000 08:01 1 /venv/torch/lib/libgomp.so.1
7f01-7f02 r--p 00000000 08:01 1 /venv/torch/lib/libgomp.so.1
7f02-7f03 r-xp 00000000 08:01 2 /usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0
7f03-7f04 r-xp 00000000 08:01 3 /opt/intel/lib/libiomp5.so
7f04-7f05 r-xp 00000000 08:01 4 /usr/lib/libcomposer.so.1
7f05-7f06 rw-p 00000000 00:00 0 [heap]
7f06-7f07 r-xp 00000000 08:01 5 /venv/libgomp-98b21ff3.so.1.0.0
"""
    assert runtimes(maps) == [
        "/venv/torch/lib/libgomp.so.1",
        "/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0",
        "/opt/intel/lib/libiomp5.so",
        "/venv/libgomp-98b21ff3.so.1.0.0",
    ]


def test_torch_runs_on_one_of_them() -> None:
    assert torch_runtime() in runtimes()


def test_each_thread_runs_once() -> None:
    seen: list[int] = []
    each_thread(lambda: seen.append(threading.get_native_id()), 3)
    assert len(seen) == len(set(seen)) == 3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be divided")
def test_pinned_threads_stay_and_torch_uses_them() -> None:
    """In a child process, which keeps its affinity."""
    code = """
import os, threading, torch
from dualpace.cpu.openmp import each_thread, pin_threads
cores = sorted(os.sched_getaffinity(0))[:2]
torch.set_num_threads(2)
pin_threads(cores)
where = {}
each_thread(lambda: where.update({threading.get_native_id(): os.sched_getaffinity(0)}), 2)
assert sorted(where.values(), key=min) == [{core} for core in cores], where
before = len(os.listdir("/proc/self/task"))
torch.randn(512, 512) @ torch.randn(512, 512)
torch.randn(1 << 20).sum()
assert len(os.listdir("/proc/self/task")) == before
try:
    pin_threads([cores[0], 4095])
except OSError:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n"
