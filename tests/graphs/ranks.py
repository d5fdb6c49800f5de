"""How the tests run the ranks of a group: as processes, or as threads over one buffer."""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from dualpace.graphs.collective import Collective, TorchCollective
from dualpace.graphs.shared_memory_collective import SharedMemoryCollective

_MAX_BYTES = 4096


def in_threads(
    size: int, work: Callable[[Collective], Any], max_bytes: int = 1 << 16, **options: Any
) -> list[Any]:
    """What `work` returns on each rank."""
    buffer = bytearray(SharedMemoryCollective.num_bytes(size, max_bytes))

    def one(rank: int) -> Any:
        return work(SharedMemoryCollective(buffer, rank, size, max_bytes, **options))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def in_processes(size: int, work: Callable[..., Any], folder: Path) -> list[Any]:
    """What `work(gloo, shared_memory)`, a module's function, returns on each rank; None of one that
    died.
    """
    (folder / "memory").write_bytes(bytes(SharedMemoryCollective.num_bytes(size, _MAX_BYTES)))
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, size, work, folder)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    paths = [folder / f"result-{rank}" for rank in range(size)]
    return [torch.load(path) if path.is_file() else None for path in paths]


def _rank(rank: int, size: int, work: Callable[..., Any], folder: Path) -> None:
    torch.set_num_threads(1)
    gloo = TorchCollective.join("gloo", rank, size, folder / "meeting")
    with (folder / "memory").open("r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
    result = work(gloo, SharedMemoryCollective(view, rank, size, _MAX_BYTES, timeout_s=60))
    torch.save(result, folder / f"result-{rank}")
