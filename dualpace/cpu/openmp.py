"""The one OpenMP pool of the process: run a native function on torch's own threads.

Kernels here are plain C callbacks `void f(void *block)`. They are started through the
`GOMP_parallel` entry of the runtime that torch has loaded already, so that dense stages and
attention share one set of threads, and no second runtime spins beside it. This file knows nothing
about what the callbacks do.
"""

import ctypes
import functools
import re
from pathlib import Path

import torch  # loads the OpenMP runtime that everything below shares

_LIBRARY = re.compile(r"/lib(gomp|iomp5|omp)[-.\w]*\.so[.\d]*$")


def runtimes(maps: str | None = None) -> list[str]:
    """Paths of the OpenMP runtimes mapped into this process, in order of address.

    More than one means that two pools may spin against each other. `maps` is the text of a
    /proc/PID/maps (tests).
    """
    text = Path("/proc/self/maps").read_text() if maps is None else maps
    paths = [line.split(maxsplit=5)[5] for line in text.splitlines() if line.count("/")]
    return list(dict.fromkeys(path for path in paths if _LIBRARY.search(path)))


def torch_runtime() -> str:
    """Path of the runtime that torch's kernels run on: the mapped one shipped with torch, else
    the first mapped.
    """
    mapped = runtimes()
    if not mapped:
        raise RuntimeError(
            "torch has loaded no OpenMP runtime; the CPU kernels need a torch built with OpenMP"
        )
    home = str(Path(torch.__file__).resolve().parent)
    return next((path for path in mapped if path.startswith(home)), mapped[0])


@functools.cache
def address_of(entry: str) -> int:
    """Of an entry of that runtime, which all of them name as GNU's does."""
    address = ctypes.cast(getattr(ctypes.CDLL(torch_runtime()), entry), ctypes.c_void_p).value
    assert address is not None
    return address


@functools.cache
def _gomp_parallel() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(torch_runtime()).GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


def parallel(function: int, block: int, num_threads: int) -> None:
    """Call the C function at address `function` with the pointer `block` on up to `num_threads`
    threads at once.

    Returns when all have returned; the GIL is free meanwhile. The runtime may grant fewer threads
    than asked for: callbacks share their work through a counter and never rely on the number. Ask
    for one thread or for all: a pool that is asked for fewer threads than before ends the others,
    and starting them again takes longer than a small kernel.
    """
    _gomp_parallel()(function, block, num_threads, 0)
