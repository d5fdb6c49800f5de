"""KV on its way between the pools on a device: swaps by DMA on streams of their own, and a
prompt's layers written straight to host memory (paper 4.1).

Every copy ends with an event that the worker polls. The main stream waits for what it may overtake:
swaps before a round touches HBM, the copies of two layers ago before their K and V are overwritten.
"""

# mypy: allow-untyped-calls

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualpace.graphs.gpu import kv
from dualpace.graphs.gpu.host_memory import HostMemory
from dualpace.graphs.gpu.kv_heads import HeadMover
from dualpace.runtime.kv.overlaps import ALL, Overlap
from dualpace.runtime.messages import GpuBatch
from dualpace.runtime.types import TransferKind
from dualpace.runtime.worker.copies import all_done
from dualpace.runtime.worker.cuda.batches import aligned
from dualpace.runtime.worker.cuda.events import DeviceEvent
from dualpace.runtime.worker.move_checks import MoveChecks, nothing
from dualpace.runtime.worker.rows import PromptRow


@dataclass(frozen=True, slots=True)
class RegisteredPool:
    """The host pool, `blocks` [B, L, 2, K, 16, D], and what keeps it registered. Of several ranks:
    one CPU rank's part, which has heads in common with this rank.
    """

    blocks: Tensor
    memory: HostMemory
    common: Overlap = ALL

    @property
    def heads(self) -> Tensor:
        """The common ones of `blocks`."""
        return self.blocks[:, :, :, self.common.theirs]

    def mover(self, pool: Tensor) -> "kv.BlockMover | HeadMover":
        """Between it and `pool` [L, B, 2, K, 16, D] on the device."""
        here, there = pool[:, :, :, self.common.own], self.heads
        if here.shape == pool.shape and there.shape == self.blocks.shape:
            return kv.BlockMover(pool, self.blocks, chunk_blocks=self.memory.chunk_pieces)
        return HeadMover(here, there)


class DeviceTransfers:
    """Starts copies between the pools, `pool` [L, B, 2, K, 16, D] on the device, and knows which
    transfers have ended.
    """

    def __init__(
        self, pool: Tensor, hosts: Sequence[RegisteredPool], checks: MoveChecks | None = None
    ) -> None:
        self.checks = checks
        self._registered = hosts  # for as long as copies may run
        self._out, self._in = ([host.mover(pool) for host in hosts] for _ in range(2))
        self._out_stream, self._in_stream = (torch.cuda.Stream(pool.device) for _ in range(2))
        self._events: dict[int, list[DeviceEvent]] = {}  # by transfer

    @property
    def must_poll(self) -> bool:
        """No doorbell rings when a device's copy ends."""
        return bool(self._events)

    def start_migrations(self, batch: GpuBatch) -> None:
        """Starts the batch's swaps after all that the main stream has been given, and lets what it
        is given next wait for them.
        """
        if not len(batch.migration_ids):
            return
        main = torch.cuda.current_stream()
        before = DeviceEvent(main)
        before.holds(self._out_stream)
        before.holds(self._in_stream)
        for i, transfer_id in enumerate(batch.migration_ids.tolist()):
            part = slice(batch.migration_offsets[i], batch.migration_offsets[i + 1])
            source, target = batch.source_blocks[part].tolist(), batch.target_blocks[part].tolist()
            out = bool(batch.migration_kinds[i] == TransferKind.SWAP_OUT)
            stream = self._out_stream if out else self._in_stream
            with torch.cuda.stream(stream):
                arrived = nothing
                if self.checks is not None:
                    arrived = self.checks.swap(transfer_id, out, source, target)
                if out:
                    for mover in self._out:
                        mover.swap_out(source, target)
                else:
                    for mover in self._in:
                        mover.swap_in(source, target)
                arrived()
            event = DeviceEvent(stream)
            event.holds(main)
            self.track(transfer_id, [event])

    def track(self, transfer_id: int, events: list[DeviceEvent]) -> None:
        """The transfer ends with the last of `events`."""
        self._events[transfer_id] = events

    def take_ended(self) -> list[int]:
        """Ids of transfers that have ended since the last call."""
        ended = [number for number, events in self._events.items() if all_done(events)]
        for number in ended:
            del self._events[number]
        return ended


class WriteOut:
    """Prompts' K and V to their host blocks, a layer at a time, beside the layers that follow.

    The rounds keep K and V in two buffers that layers take in turns, so nothing is staged twice.
    """

    def __init__(self, hosts: Sequence[RegisteredPool], checks: MoveChecks | None = None) -> None:
        self._checks = checks
        self._registered = hosts
        self._hosts = [(host.common.own, host.heads) for host in hosts]
        self._stream = torch.cuda.Stream(host_device())
        self._readers: list[DeviceEvent | None] = [None, None]

    def before_layer(self, layer: int) -> None:
        """The main stream may overwrite this layer's buffer of K and V after this."""
        reader = self._readers[layer % 2]
        if reader is not None:
            reader.holds(torch.cuda.current_stream())

    def before_round(self) -> None:
        """The main stream may overwrite both buffers, and the block ids, after this."""
        for layer in (0, 1):
            self.before_layer(layer)

    def layer(
        self, layer: int, k: Tensor, v: Tensor, blocks: Tensor, prompts: Sequence[PromptRow]
    ) -> DeviceEvent:
        """Writes [T, K, D] of all rows; a prompt's are those from `first` on. `blocks`:
        `batches.host_blocks` on the device. Returns the last one's event.
        """
        DeviceEvent().holds(self._stream)
        start = 0
        with torch.cuda.stream(self._stream):
            for prompt in prompts:
                rows = slice(prompt.first, prompt.first + prompt.num_tokens)
                end = start + len(prompt.blocks)
                if self._checks is not None:
                    ids = prompt.blocks.tolist()
                    self._checks.prompt(prompt.transfer_id, layer, k[rows], v[rows], ids)
                for own, host in self._hosts:
                    kv.write_out(k[rows, own], v[rows, own], host, layer, blocks[start:end])
                start += aligned(len(prompt.blocks))
        event = DeviceEvent(self._stream)
        self._readers[layer % 2] = event
        return event


def make_checks(pool: Tensor, hosts: Sequence[RegisteredPool]) -> MoveChecks:
    """For both of them, which share it."""

    def fetch(sums: Tensor) -> Tensor:
        there = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=sums.is_cuda)
        return there.copy_(sums, non_blocking=True)

    return MoveChecks(pool, [(host.common.own, host.heads) for host in hosts], fetch)


def host_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
