"""Anonymous shared memory that is really there: a memfd, reserved in full, mapped, passed by
descriptor.

It has no name, so nothing is left behind however a process ends, and no tracker can unlink it
under its users.
"""

import errno
import mmap
import os

from dualpace.errors import ConfigError


class SharedRegion:
    """`nbytes` of zeroed memory shared by everyone who holds `fd`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, name: str, nbytes: int) -> "SharedRegion":
        """Reserves every page now. Raises ConfigError where there is not that much memory."""
        assert nbytes > 0
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise ConfigError(
                f"{name} needs {nbytes / 2**30:.2f} GiB of memory and that much is not free; "
                "lower kv.host_blocks"
            ) from None
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
