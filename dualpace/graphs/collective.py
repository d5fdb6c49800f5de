"""Collectives: how the ranks of a tensor-parallel group add and gather tensors.

Every rank makes the same calls in the same order, with tensors of the same shape. A sum has the
same bits on every rank, so that all of them go on from equal activations to equal tokens. Knows
nothing about models or processes.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Newer versions of torch have another name for it and warn of the old one.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PeerLost(RuntimeError):
    """Another rank has ended or does not answer; this group cannot go on."""


class Collective(Protocol):
    """One rank's end of a group. PeerLost where another rank is gone."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, written to contiguous x (float32 or bf16) and returned."""

    def all_gather(self, x: Tensor) -> Tensor:
        """x of all ranks side by side in the order of the ranks: [..., n] -> [..., size * n]."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""


class Alone:
    """The group of one. Nothing on the way of a batch calls it."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def barrier(self) -> None:
        pass


class TorchCollective:
    """A process group of torch: Gloo for tensors on the CPU, NCCL for those on GPUs.

    On a GPU the calls go to the current stream and can be captured in a CUDA graph; what ranks wait
    for is then the device's business, and a lost peer shows when the stream is waited for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @classmethod
    def join(
        cls,
        backend: str,
        rank: int,
        size: int,
        meeting: Path,
        timeout_s: float = 60.0,
        device: torch.device | None = None,
    ) -> TorchCollective:
        """Make this process rank `rank` of the process's one group, when all ranks have come.

        backend: gloo | nccl, the latter with the rank's `device`. meeting: a file that did not
        exist, the same for all ranks of one group and for no other group.
        """
        try:
            dist.init_process_group(
                backend,
                store=dist.FileStore(str(meeting), size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device,
            )
        except (dist.DistError, RuntimeError) as error:
            raise PeerLost(f"rank {rank} of {size} could not join its group: {error}") from error
        group = dist.group.WORLD
        assert group is not None
        return cls(group)

    @staticmethod
    def leave() -> None:
        """Undo `join`."""
        dist.destroy_process_group()

    def all_reduce(self, x: Tensor) -> Tensor:
        self._run(dist.all_reduce, x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size, *x.shape)
        self._run(_gather, parts.view(-1), x.reshape(-1))
        return parts.movedim(0, -2).flatten(-2)

    def barrier(self) -> None:
        self._run(dist.barrier)

    def _run(self, call: object, *tensors: Tensor) -> None:
        try:
            call(*tensors, group=self.group)  # type: ignore[operator]
        except RuntimeError as error:
            raise PeerLost(f"a rank of {self.size} is gone: {error}") from error
