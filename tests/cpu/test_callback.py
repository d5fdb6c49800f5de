"""Processes that want one kernel at the same time: one compiles it, the others load that."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import PATIENCE_S

CHILD = """
import sys
from numba.core.ccallback import CFunc
compiles, compile_it = [], CFunc._compile_uncached
def counted(self):
    compiles.append(self)
    return compile_it(self)
CFunc._compile_uncached = counted
from dualpace.cpu.append_kernel import append_kernel
assert append_kernel()
print(len(compiles), flush=True)
for _ in sys.stdin:
    append_kernel.cache_clear()
    assert append_kernel()
    print(len(compiles), flush=True)
"""


def start(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_two_want_at_once_is_compiled_once_and_loaded_without_waiting(tmp_path: Path) -> None:
    with start(tmp_path) as one, start(tmp_path) as other:
        assert one.stdout and one.stdin and other.stdout
        counts = [int(one.stdout.readline()), int(other.stdout.readline())]
        assert sorted(counts) == [0, 1]
        [made] = tmp_path.glob("*.made")
        with made.with_suffix(".lock").open("w") as lock:  # as if somebody were at it
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert one.communicate("again\n", timeout=PATIENCE_S) == (f"{counts[0]}\n", None)
        assert other.communicate(timeout=PATIENCE_S) == ("", None)


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_files_that_a_full_disk_cut_short_are_made_anew(kept: float, tmp_path: Path) -> None:
    with start(tmp_path) as process:
        assert process.stdout and process.stdin and process.stdout.readline() == "1\n"
        for count, kind in ((2, "nbi"), (3, "nbc")):
            [file] = tmp_path.glob(f"*/*.{kind}")
            file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
            process.stdin.write("again\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{count}\n"
        assert process.communicate("again\n", timeout=PATIENCE_S) == ("3\n", None)  # from disk
