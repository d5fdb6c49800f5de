"""KV on its way between the pools: swaps, and the layer-wise staging of Prefill-to-CPU (paper 4.1).

Every copy has an event. Blocks and staging buffers are touched again only after the events of the
copies that read or write them; the engine hears of a transfer when all of its events have fired.
This is the stand-in's mover: its copies are numpy assignments on the copy thread, which take no
thread of the compute's pool.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from dualpace.block import BLOCK_TOKENS
from dualpace.runtime.messages import GpuBatch
from dualpace.runtime.types import TransferKind
from dualpace.runtime.worker.copies import CopyEngine, CopyEvent, all_done
from dualpace.runtime.worker.kv_pools import AcceleratorPool, HostPart, Words, as_words
from dualpace.runtime.worker.move_checks import MoveChecks, nothing
from dualpace.runtime.worker.rows import Int32, PromptRow

_STAGING_BUFFERS = 2


class Transfers:
    """Starts copies and knows which transfers have ended."""

    must_poll = False  # the copy thread rings the doorbell

    def __init__(
        self,
        hbm: AcceleratorPool,
        hosts: Sequence[HostPart],
        copies: CopyEngine,
        checks: MoveChecks | None = None,
    ) -> None:
        self.checks = checks
        words = hbm.words()
        self._pools = [(words[:, :, :, host.common.own], host.words()) for host in hosts]
        self._copies = copies
        self._events: dict[int, list[CopyEvent]] = {}  # by transfer
        self._migrations: list[CopyEvent] = []

    def start_migrations(self, batch: GpuBatch) -> None:
        """Starts the batch's swaps. Their sources must be complete."""
        for i, transfer_id in enumerate(batch.migration_ids.tolist()):
            part = slice(batch.migration_offsets[i], batch.migration_offsets[i + 1])
            source, target = batch.source_blocks[part], batch.target_blocks[part]
            is_out = batch.migration_kinds[i] == TransferKind.SWAP_OUT
            arrived = nothing
            if self.checks is not None:
                blocks = source.tolist(), target.tolist()
                arrived = self.checks.swap(transfer_id, is_out, *blocks)
            event = (self._swap_out if is_out else self._swap_in)(source, target, arrived)
            self._migrations.append(event)
            self.track(transfer_id, [event])

    def migrations(self) -> list[CopyEvent]:
        """Events of swaps that have not fired: no KV may be written or read in HBM before they
        have.

        Those of earlier batches count too, since one without rows waits for nothing.
        """
        self._migrations = [event for event in self._migrations if not event.is_done()]
        return self._migrations

    def track(self, transfer_id: int, events: list[CopyEvent]) -> None:
        """All copies of the transfer have been issued: it ends with the last of `events`."""
        self._events[transfer_id] = events

    def take_ended(self) -> list[int]:
        """Ids of transfers that have ended since the last call."""
        ended = [number for number, events in self._events.items() if all_done(events)]
        for number in ended:
            del self._events[number]
        return ended

    def _swap_out(self, source: Int32, target: Int32, arrived: Callable[[], None]) -> CopyEvent:
        def copy() -> None:
            for hbm, host in self._pools:
                host[target] = hbm[:, source].swapaxes(0, 1)
            arrived()

        return self._copies.submit(copy)

    def _swap_in(self, source: Int32, target: Int32, arrived: Callable[[], None]) -> CopyEvent:
        def copy() -> None:
            for hbm, host in self._pools:
                hbm[:, target] = host[source].swapaxes(0, 1)
            arrived()

        return self._copies.submit(copy)


class Staging:
    """Two buffers of K and V for one layer of `max_tokens` tokens; layers take turns."""

    def __init__(
        self,
        hbm: AcceleratorPool,
        hosts: Sequence[HostPart],
        max_tokens: int,
        copies: CopyEngine,
        checks: MoveChecks | None = None,
    ) -> None:
        self._checks = checks
        _, _, _, kv_heads, _, head_dim = hbm.blocks.shape
        size = (_STAGING_BUFFERS, 2, max_tokens, kv_heads, head_dim)
        self._buffers = hbm.blocks.new_empty(size)
        self._words = as_words(self._buffers)
        self._hosts = [(host.common.own, host.words()) for host in hosts]
        self._copies = copies
        self._readers: list[list[CopyEvent]] = [[] for _ in range(_STAGING_BUFFERS)]

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes

    def readers(self, layer: int) -> list[CopyEvent]:
        """Events that must have fired before `put` for this layer."""
        return self._readers[layer % _STAGING_BUFFERS]

    def put(
        self, layer: int, k: Tensor, v: Tensor, prompts: Sequence[PromptRow]
    ) -> list[CopyEvent]:
        """Stages k and v ([T, kv_heads, head_dim] of all `prompts`, which lie one after another)
        and issues each prompt's copy to its host blocks. Returns their events, one a prompt.
        """
        which = layer % _STAGING_BUFFERS
        origin = prompts[0].first
        num_tokens = prompts[-1].first + prompts[-1].num_tokens - origin
        assert num_tokens <= self._buffers.shape[2], "Prefill-to-CPU above the hard token limit"
        self._buffers[which, 0, :num_tokens] = k
        self._buffers[which, 1, :num_tokens] = v
        events = []
        for prompt in prompts:
            assert prompt.start == 0, "a prompt that goes to the host is one forward"
            first = prompt.first - origin
            rows = slice(first, first + prompt.num_tokens)
            if self._checks is not None:
                blocks = prompt.blocks.tolist()
                self._checks.prompt(prompt.transfer_id, layer, k[rows], v[rows], blocks)
            staged = self._words[which, :, rows]
            events.append(self._copy(layer, staged, prompt.blocks))
        self._readers[which] = events
        return events

    def _copy(self, layer: int, staged: Words, blocks: Int32) -> CopyEvent:
        """`staged` is [2, T, kv_heads, head_dim]; a block wants [2, kv_heads, 16, head_dim]."""
        parts = [(staged[:, :, own], host[:, layer]) for own, host in self._hosts]

        def copy() -> None:
            for words, host in parts:
                _to_blocks(words, host, blocks)

        return self._copies.submit(copy)


def _to_blocks(staged: Words, host: Words, blocks: Int32) -> None:
    """`staged` [2, T, K, D] to `host` [B, 2, K, 16, D]; what follows in the last block stays."""
    num_tokens = staged.shape[1]
    whole, rest = divmod(num_tokens, BLOCK_TOKENS)
    by_block = staged[:, : whole * BLOCK_TOKENS].reshape(2, whole, BLOCK_TOKENS, *staged.shape[2:])
    host[blocks[:whole]] = by_block.transpose(1, 0, 3, 2, 4)
    if rest:
        host[blocks[whole], :, :, :rest] = staged[:, -rest:].swapaxes(1, 2)
