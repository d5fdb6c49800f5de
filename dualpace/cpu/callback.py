# mypy: ignore-errors
# (Numba ships no types.)
"""Kernels as native callbacks `void f(int64 *block)`: compiled once, by one process, and kept on
disk by Numba. Knows nothing about what they do.

Both workers of a start want the same kernels at the same time, and compiling takes seconds.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, config, types

from dualpace.cpu.version import source_version


def callback(kernel: Callable[[Any], None], **options: Any) -> int:
    """Address of `kernel`, which gets the address of its argument block; `options` are `cfunc`'s.

    Compiles it, or loads what any process has compiled; if one is at it, waits.
    """
    if not config.CACHE_DIR:  # Numba finds a folder of its own, which is nobody's to lock
        return _address(kernel, options)
    made = Path(config.CACHE_DIR) / f"{_name(kernel)}.made"
    if made.exists():  # loads go side by side
        return _address(kernel, options)
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        address = _address(kernel, options)
        made.touch()
    return address


def _address(kernel: Callable[[Any], None], options: dict[str, Any]) -> int:
    try:
        return _compiled(kernel, options)
    except Exception:  # unpickling half a file, as a full disk leaves it, may raise anything
        if not (kept := _kept(kernel)):
            raise
        for file in kept:
            file.unlink(missing_ok=True)
        return _compiled(kernel, options)  # raises again what was no fault of the files


def _compiled(kernel: Callable[[Any], None], options: dict[str, Any]) -> int:
    return int(cfunc(types.void(types.intp), cache=True, **options)(kernel).address)


def _kept(kernel: Callable[[Any], None]) -> list[Path]:
    """Numba's files of the kernel."""
    code = kernel.__code__
    name = f"{Path(code.co_filename).stem}.*-{code.co_firstlineno}.*.nb[ic]"
    return list(Path(config.CACHE_DIR).glob(f"*/{name}")) if config.CACHE_DIR else []


def _name(kernel: Callable[[Any], None]) -> str:
    """Another one where Numba would compile anew, but for another machine's CPU: there nobody
    waits."""
    file = os.stat(kernel.__code__.co_filename)
    values = [repr(cell.cell_contents) for cell in kernel.__closure__ or ()]
    facts = repr((file.st_mtime_ns, file.st_size, source_version(), values))
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return f"{kernel.__module__}-{kernel.__code__.co_firstlineno}-{digest}"
