"""Both sides' workers, the memory they share, and what the loss of one means for it."""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from dualpace.runtime.assist import AssistBuffer
from dualpace.runtime.channel import Channel, ring
from dualpace.runtime.engine.group import WorkerGroup
from dualpace.runtime.order import Order
from dualpace.runtime.plan import Plan
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wire import Message
from dualpace.runtime.wiring import (
    assist_layout,
    assist_stretches,
    channel_size,
    collective_bytes,
    host_pool_bytes,
    host_pool_stretches,
    lockstep_layout,
    ranks_of,
)

_HOST_POOL = "host KV pool"


class WorkerPair:
    """Owns all shared memory. Callbacks get the role, "gpu" or "cpu"."""

    def __init__(
        self,
        plan: Plan,
        on_message: Callable[[str, Message], None],
        on_loss: Callable[[str, bool], bool],
    ) -> None:
        """`on_loss` also gets whether the worker itself is at fault, and returns whether requests
        may be the cause."""
        self._on_loss = on_loss
        self._host_pool = SharedRegion.promise(_HOST_POOL, host_pool_bytes(plan))
        self._stretches = host_pool_stretches(plan)
        self._pool_seconds = 0.0
        layout = assist_layout(plan)
        self._assist_region = SharedRegion.create(
            "assist buffer", layout.nbytes, near=assist_stretches(plan)
        )
        self._assist = AssistBuffer(self._assist_region, layout)
        fds = {"assist": self._assist_region.fd, "host_pool": self._host_pool.fd}
        if plan.policy.lockstep:
            region = SharedRegion.create("lockstep buffer", lockstep_layout(plan).nbytes)
            self._lockstep = region  # for as long as workers are started
            fds["lockstep"] = region.fd
        channels = {
            role: [
                Channel.create(f"{role} channel", channel_size(plan, role))
                for _ in range(ranks_of(plan, role))
            ]
            for role in ("gpu", "cpu")
        }
        module, plan_json = plan.runtime.worker_module, plan.to_json()

        def group(role: str, other: str) -> WorkerGroup:
            common = RanksMemory(channels[role])
            bells = {f"other_bell_{n}": c.bell_down for n, c in enumerate(channels[other])}
            return WorkerGroup(
                role,
                module,
                plan_json,
                channels[role],
                {**fds, **common.fds, **bells},
                common.reset,
                lambda message: on_message(role, message),
                lambda is_at_fault: self._lost(role, is_at_fault),
            )

        self.gpu = group("gpu", "cpu")
        self.cpu = group("cpu", "gpu")

    async def start(self, ended: asyncio.Event) -> None:
        """Starts both, and while they import and load takes the host pool's memory, for which they
        wait before they are ready. Raises ConfigError where there is not that much. Returns early
        where `ended` is set."""
        self.gpu.start()
        self.cpu.start()
        started_s = time.monotonic()
        reserve = self._host_pool.reserve
        taking = asyncio.create_task(
            asyncio.to_thread(reserve, _HOST_POOL, huge=True, near=self._stretches)
        )
        stopped = asyncio.create_task(ended.wait())
        await asyncio.wait({taking, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if taking.done():
            taking.result()
        self._pool_seconds = time.monotonic() - started_s

    async def close(self) -> None:
        self.gpu.close()
        self.cpu.close()

    @property
    def ready(self) -> bool:
        return self.gpu.ready and self.cpu.ready

    @property
    def epoch(self) -> int:
        """Rises with every loss of a worker."""
        return self._assist.epoch

    def info(self) -> dict[str, Any]:
        """What each worker said when it became ready, and what the engine itself did."""
        return {
            "host_pool_seconds": self._pool_seconds,
            "host_pool_bytes": self._host_pool.nbytes,
            "gpu": {"pid": self.gpu.pid, **self.gpu.info},
            "cpu": {"pid": self.cpu.pid, **self.cpu.info},
        }

    @property
    def assist_is_running(self) -> bool:
        """The GPU worker has taken an assist that it has not answered."""
        return self._assist.is_running

    def _lost(self, role: str, is_at_fault: bool) -> None:
        """Voids the assist in flight, wakes the survivors, and starts a successor."""
        lost, survivor = (self.gpu, self.cpu) if role == "gpu" else (self.cpu, self.gpu)
        is_suspected = self._on_loss(role, is_at_fault)
        self._assist.raise_epoch()
        for bell in survivor.doorbells:
            ring(bell)
        lost.restart(is_suspected)


class RanksMemory:
    """What the ranks of one group share among themselves; nothing where there is but one."""

    def __init__(self, channels: list[Channel]) -> None:
        self.fds: dict[str, int] = {}
        self._regions: list[SharedRegion] = []
        if len(channels) == 1:
            return
        size = len(channels)
        collective = SharedRegion.create("memory of collectives", collective_bytes(size))
        order = SharedRegion.create("order of a group", Order.nbytes(size))
        self._regions = [collective, order]
        self._meeting = os.memfd_create("meeting of a group", os.MFD_CLOEXEC)
        self.fds = {"collective": collective.fd, "order": order.fd, "meeting": self._meeting}
        for rank, channel in enumerate(channels):
            self.fds[f"bell_{rank}"] = channel.bell_down

    def reset(self) -> None:
        """As new; no rank is running."""
        for region in self._regions:
            region.view[:] = bytes(region.nbytes)
        if self._regions:
            os.ftruncate(self._meeting, 0)
