"""Anonymous shared memory that is really there: a memfd, reserved in full, mapped, passed by
descriptor.

It has no name, so nothing is left behind however a process ends, and no tracker can unlink it
under its users.
"""

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from dualpace.errors import ConfigError

_STEP_BYTES = 256 * 2**20
_HEADROOM_BYTES = 2 * _STEP_BYTES  # left to the rest of the machine
_GROWTH_S = 3.0  # a virtual machine may be given more memory only as it fills


def available_bytes() -> int:
    """Memory that can be taken without swapping, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")


class SharedRegion:
    """`nbytes` of zeroed memory shared by everyone who holds `fd`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self._map)

    @classmethod
    def create(
        cls, name: str, nbytes: int, available: Callable[[], int] = available_bytes
    ) -> "SharedRegion":
        """Reserves every page now. Raises ConfigError where there is not that much memory."""
        assert nbytes > 0
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        # Piece by piece: one large reservation ends in the hands of the out-of-memory killer.
        for start in range(0, nbytes, _STEP_BYTES):
            if not (_has_headroom(available) and _reserve(fd, start, nbytes)):
                os.close(fd)
                raise ConfigError(
                    f"{name} needs {nbytes / 2**30:.2f} GiB of memory and only "
                    f"{start / 2**30:.2f} GiB could be had; lower kv.host_blocks"
                )
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int) -> "SharedRegion":
        return cls(fd, os.fstat(fd).st_size)

    def close(self) -> None:
        """Unmaps, unless arrays still look into it (then their end does), and closes `fd`."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # numpy or torch views outlive us; the memory goes when they do
        os.close(self.fd)


def _has_headroom(available: Callable[[], int]) -> bool:
    deadline = time.monotonic() + _GROWTH_S
    while available() < _HEADROOM_BYTES:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _reserve(fd: int, start: int, nbytes: int) -> bool:
    """Allocates the pages of one step; False where the kernel has none."""
    try:
        os.posix_fallocate(fd, start, min(_STEP_BYTES, nbytes - start))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        return False
    return True
