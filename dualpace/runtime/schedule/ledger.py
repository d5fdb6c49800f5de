"""Who is where and which blocks they hold: queues, both block pools, rounds and copies in flight.

Its moves keep the counts right and decide nothing. The only code that frees KV, as `commit` is the
only one that allocates it.
"""

from bisect import bisect_left, insort
from collections import deque

from dualpace.runtime.kv.pool import BlockPool
from dualpace.runtime.schedule.envelope import HostEnvelope, finish_growth, migration_reserve
from dualpace.runtime.schedule.rounds import CpuStep, GpuStep, Snapshot, Transfer
from dualpace.runtime.types import Owner, Phase, Request, TransferKind


class Ledger:
    """All requests that have not let go of everything. Pool sizes are in blocks, scratch included.

    Read what you like; only `State` and the modules of its verbs (`commit`, `apply`, `loss`) move
    anything.
    """

    def __init__(self, gpu_blocks: int, host_blocks: int) -> None:
        self.gpu_pool = BlockPool(gpu_blocks)
        self.host_pool = BlockPool(host_blocks)

        self.requests: dict[int, Request] = {}  # everyone who has not ended
        self.waiting: deque[Request] = deque()  # arrival order, a prompt in progress at the head
        self.gpu_running: list[Request] = []  # arrival order
        self.cpu_waiting: deque[Request] = deque()
        self.cpu_running: list[Request] = []
        self.marked: list[Request] = []
        self.ending: dict[int, Request] = {}  # reach max_tokens with a GPU round in flight
        self.lingering: dict[int, Request] = {}  # ended, blocks still touched by rounds or copies
        self.on_probation: dict[int, Request] = {}  # suspects of a lost round (`probation`)

        self.gpu_in_flight: deque[GpuStep] = deque()  # two at most
        self.cpu_in_flight: CpuStep | None = None
        self.transfers: dict[int, Transfer] = {}  # outstanding
        self.staging: set[int] = set()  # outstanding Prefill-to-CPU transfers
        self.planned = 0  # host blocks that outstanding copies write
        self.gpu_vacating = 0  # HBM blocks that outstanding swap-outs read
        self.queue_peak = 0  # summed finish peaks of `gpu_running`
        self._growth: int | None = 0  # Equation 3, None when it must be counted again
        self.changes = 0  # rises whenever a round changes what the other engine decides by
        self.preempted_gpu: list[int] = []  # not yet in a step's record
        self.preempted_cpu: list[int] = []
        self.gpu_rounds = self.cpu_rounds = 0
        self._num_transfers = 0

    # what others may read

    @property
    def in_progress(self) -> Request | None:
        """The prompt that is being computed over several rounds, at the head of waiting."""
        return self.waiting[0] if self.waiting and self.waiting[0].blocks else None

    @property
    def gpu_peak(self) -> int:
        """Equation 4: summed finish peaks of the GPU-owned requests, a prompt in progress too."""
        partial = self.in_progress
        return self.queue_peak + (partial.peak_blocks if partial else 0)

    @property
    def growth(self) -> int:
        """Equation 3: what the CPU-running requests may still need."""
        if self._growth is None:
            self._growth = finish_growth(self.cpu_running)
        return self._growth

    @property
    def envelope(self) -> HostEnvelope:
        """Equation 2 as it stands: the CPU reads the reserve here, so it is never out of date."""
        peak = self.gpu_peak
        return HostEnvelope(
            capacity=self.host_pool.capacity,
            used=self.host_pool.num_used - self.planned,
            planned=self.planned,
            growth=self.growth,
            migration=migration_reserve(reversed(self.gpu_running), peak, self.gpu_pool.capacity),
        )

    def snapshot(self) -> Snapshot:
        """The counts of the round log."""
        return Snapshot(
            gpu_capacity=self.gpu_pool.capacity,
            gpu_used=self.gpu_pool.num_used,
            host=self.envelope,
            waiting=len(self.waiting),
            gpu_running=len(self.gpu_running),
            cpu_waiting=len(self.cpu_waiting),
            cpu_running=len(self.cpu_running),
        )

    # queues

    def join_gpu_queue(self, request: Request) -> None:
        """Puts a decode at its place in arrival order."""
        insort(self.gpu_running, request, key=_order)
        self.queue_peak += request.peak_blocks

    def leave_gpu_queue(self, request: Request) -> None:
        place = bisect_left(self.gpu_running, request.order, key=_order)
        assert self.gpu_running[place] is request
        del self.gpu_running[place]
        self.queue_peak -= request.peak_blocks
        self.changes += 1  # the reserve may have fallen

    def _in_gpu_queue(self, request: Request) -> bool:
        place = bisect_left(self.gpu_running, request.order, key=_order)
        return place < len(self.gpu_running) and self.gpu_running[place] is request

    def set_cpu_running(self, requests: list[Request]) -> None:
        self.cpu_running = requests
        self.recount_growth()

    def recount_growth(self) -> None:
        """Somebody has joined or left CPU running, got a block or a new finish peak there."""
        self._growth = None

    def mark(self, request: Request) -> None:
        request.marked = True
        self.marked.append(request)

    def unmark(self, request: Request) -> None:
        if request.marked:
            request.marked = False
            self.marked.remove(request)

    def recompute(self, request: Request, by: list[int]) -> None:
        """Drops the KV of a request in no queue but the GPU's; back to waiting, by arrival.

        `by` is the record of the engine that drops it. The prompt in progress keeps the head:
        it holds blocks that anybody before it may be waiting for.
        """
        assert request.ready, f"request {request.id} is touched by something in flight"
        if request.id not in by:
            by.append(request.id)
        if self._in_gpu_queue(request):
            self.leave_gpu_queue(request)
        self.unmark(request)
        self._free_blocks(request)
        request.kv_len = 0
        request.phase, request.owner = Phase.WAITING, Owner.GPU
        request.num_preemptions += 1
        place = 1 if self.in_progress else 0
        while place < len(self.waiting) and self.waiting[place].order < request.order:
            place += 1
        self.waiting.insert(place, request)

    def end(self, request: Request) -> None:
        """It leaves its queue; its blocks go when nothing in flight touches them."""
        self.leave_queues(request)
        self.unmark(request)
        self.on_probation.pop(request.id, None)
        del self.requests[request.id]
        request.phase = Phase.ENDED
        self.lingering[request.id] = request
        self.release_if_unpinned(request)

    def leave_queues(self, request: Request) -> None:
        if self.ending.pop(request.id, None):
            return
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.owner is Owner.GPU:
            self.leave_gpu_queue(request)
        elif request in self.cpu_running:
            self.cpu_running.remove(request)
            self.recount_growth()
        else:
            self.cpu_waiting.remove(request)

    def release_if_unpinned(self, request: Request) -> None:
        if request.phase is Phase.ENDED and request.ready and request.id in self.lingering:
            del self.lingering[request.id]
            self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        (self.gpu_pool if request.owner is Owner.GPU else self.host_pool).free(request.blocks)
        request.blocks = []

    def end_lockstep(self, step: GpuStep) -> None:
        """Host rows of a GPU step (neo) are CPU-running for that step only."""
        if step.has_host_rows:
            self.cpu_waiting.extendleft(reversed(self.cpu_running))
            self.set_cpu_running([])

    # copies

    def start_transfer(
        self,
        request: Request,
        kind: TransferKind,
        source: list[int],
        target: list[int],
        held: list[int],
    ) -> Transfer:
        """Registers a copy that pins the request until it is reported."""
        self._num_transfers += 1
        transfer = Transfer(self._num_transfers, request, kind, source, target, held)
        self.transfers[transfer.id] = transfer
        request.pins += 1
        return transfer

    def retire(self, transfer: Transfer) -> None:
        """Unpins the request, frees the source, and counts the destination as materialized."""
        transfer.request.pins -= 1
        if transfer.kind is TransferKind.SWAP_IN:
            self.host_pool.free(transfer.held)
            return
        self.planned -= len(transfer.dst_blocks)
        self.gpu_pool.free(transfer.held)
        self.gpu_vacating -= len(transfer.held)
        self.staging.discard(transfer.id)


def _order(request: Request) -> int:
    return request.order
