"""Anonymous shared memory that is really there: a memfd, reserved in full, mapped, passed by
descriptor.

It has no name, so nothing is left behind however a process ends, and no tracker can unlink it
under its users. A large region may be put in huge pages: the kernel's setting for shared memory is
usually "never", but a process may ask for them by range.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dualpace.errors import ConfigError

_STEP_BYTES = 256 * 2**20
_HEADROOM_BYTES = 2 * _STEP_BYTES  # left to the rest of the machine
_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1
_SLOW_S = 0.5  # for one step: memory is in pieces, and a start must not wait until it is tidied up
_MAP_FIXED = 0x10
_RESERVED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # nothing is to change about its pages
Stretch = tuple[int, Sequence[int]]  # so many bytes, one after another, and whose cores use them
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
        self.view = _mapped(fd, nbytes)

    @classmethod
    def create(
        cls,
        name: str,
        nbytes: int,
        available: Callable[[], int] = available_bytes,
        huge: bool = False,
        near: Sequence[Stretch] = (),
    ) -> "SharedRegion":
        """A region that is there: see `reserve`, which takes the other arguments."""
        region = cls.promise(name, nbytes)
        try:
            region.reserve(name, available, huge, near)
        except ConfigError:
            region.close()
            raise
        return region

    @classmethod
    def promise(cls, name: str, nbytes: int) -> "SharedRegion":
        """A region of that size without a page: it can be handed on, and reserved meanwhile."""
        assert nbytes > 0
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int) -> "SharedRegion":
        return cls(fd, os.fstat(fd).st_size)

    def reserve(
        self,
        name: str,
        available: Callable[[], int] = available_bytes,
        huge: bool = False,
        near: Sequence[Stretch] = (),
    ) -> None:
        """Takes every page now, in huge pages if they are wanted and quickly to be had; those of
        `near` on the NUMA node of the stretch's cores. Raises ConfigError where there is not that
        much memory.
        """
        # Piece by piece: one large reservation ends in the hands of the out-of-memory killer.
        for start, end, cores in _steps(self.nbytes, near):
            enough = _has_headroom(available)
            with _running_on(cores):
                huge = huge and enough and _in_huge_pages(self.view, start, end)
                taken = enough and _reserve(self.fd, start, end)
            if not taken:
                raise ConfigError(
                    f"{name} needs {self.nbytes / 2**30:.2f} GiB of memory and only "
                    f"{start / 2**30:.2f} GiB could be had; lower kv.host_blocks"
                )
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _RESERVED)

    @property
    def is_reserved(self) -> bool:
        """For whoever holds `fd`: whether `reserve` has taken all."""
        return fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & _RESERVED == _RESERVED

    def close(self) -> None:
        """Closes `fd` and unmaps, unless arrays still look into it: then their end does."""
        with suppress(BufferError):
            self.view.release()
        os.close(self.fd)


def _mapped(fd: int, nbytes: int) -> memoryview:
    """`fd` at an address that huge pages can be mapped at. Unmapped when nobody looks any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    size = nbytes + _HUGE_PAGE
    room = libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-(room or 0) // _HUGE_PAGE) * _HUGE_PAGE
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(address, nbytes, access, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), "cannot map shared memory")
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, libc.munmap, room, size)
    return memoryview(memory).cast("B")


def _steps(nbytes: int, near: Sequence[Stretch]) -> Iterator[tuple[int, int, Sequence[int]]]:
    """(start, end, cores to be on) of pieces that lie in one stretch each."""
    first = 0
    for length, cores in (*near, (nbytes - sum(length for length, _ in near), ())):
        last = first + length
        for start in range(first, last, _STEP_BYTES):
            yield start, min(start + _STEP_BYTES, last), cores
        first = last


@contextmanager
def _running_on(cores: Sequence[int]) -> Iterator[None]:
    """Pages are taken from the node that this thread is on."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _in_huge_pages(view: memoryview, start: int, end: int) -> bool:
    """Allocates the whole huge pages of one step; whether it is worth going on."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    count = (end - start) // _HUGE_PAGE * _HUGE_PAGE
    if not count:
        return False
    began_s = time.monotonic()
    for place in range(start, start + count, _HUGE_PAGE):
        view[place] = 0  # a huge page grows around a small one, not out of nothing
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view, start))
    refused = libc.madvise(address, count, _MADV_COLLAPSE)
    return not refused and time.monotonic() - began_s < _SLOW_S


def _has_headroom(available: Callable[[], int]) -> bool:
    deadline = time.monotonic() + _GROWTH_S
    while available() < _HEADROOM_BYTES:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _reserve(fd: int, start: int, end: int) -> bool:
    """Allocates the pages of one step; False where the kernel has none."""
    try:
        os.posix_fallocate(fd, start, end - start)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        return False
    return True
