"""One OpenMP pool: found where torch loaded it, and shared by torch and the kernels."""

import subprocess
import sys
import threading

from dualpace.cpu.openmp import runtimes, torch_runtime
from tests.cpu.threads import each_thread
from tests.servers import PATIENCE_S


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


def test_torch_computes_on_the_same_threads() -> None:
    """In a child process, whose pool nothing else has used."""
    code = """
import os, torch
from tests.cpu.threads import each_thread
torch.set_num_threads(2)
each_thread(lambda: None, 2)
before = len(os.listdir("/proc/self/task"))
torch.randn(512, 512) @ torch.randn(512, 512)
torch.randn(1 << 20).sum()
assert len(os.listdir("/proc/self/task")) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
