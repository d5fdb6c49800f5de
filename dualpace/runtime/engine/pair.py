"""The two workers, the memory they share, and what the death of one means for it."""

import time
from collections.abc import Callable
from typing import Any

from dualpace.runtime.assist import AssistBuffer
from dualpace.runtime.channel import Channel, ring
from dualpace.runtime.engine.worker_handle import WorkerHandle
from dualpace.runtime.plan import Plan
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wire import Message
from dualpace.runtime.wiring import assist_layout, channel_size, kv_layout, lockstep_layout


class WorkerPair:
    """Owns all shared memory. Callbacks get the role, "gpu" or "cpu"."""

    def __init__(
        self,
        plan: Plan,
        on_message: Callable[[str, Message], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._on_death = on_death
        started_s = time.monotonic()
        self._host_pool = SharedRegion.create(
            "host KV pool", kv_layout(plan).host_bytes(plan.kv.host_blocks), huge=True
        )
        self.pool_seconds = time.monotonic() - started_s
        layout = assist_layout(plan)
        self._assist_region = SharedRegion.create("assist buffer", layout.nbytes)
        self._assist = AssistBuffer(self._assist_region, layout)
        lockstep = (
            SharedRegion.create("lockstep buffer", lockstep_layout(plan).nbytes)
            if plan.policy.lockstep
            else None
        )
        channels = {
            role: Channel.create(f"{role} channel", channel_size(plan, role))
            for role in ("gpu", "cpu")
        }
        module, plan_json = plan.runtime.worker_module, plan.to_json()

        def handle(role: str, other: str) -> WorkerHandle:
            fds = {
                "other_doorbell": channels[other].bell_down,
                "assist": self._assist_region.fd,
                "host_pool": self._host_pool.fd,
            }
            if lockstep is not None:
                fds["lockstep"] = lockstep.fd
            return WorkerHandle(
                role,
                module,
                plan_json,
                channels[role],
                fds,
                lambda message: on_message(role, message),
                lambda: self._died(role),
            )

        self.gpu = handle("gpu", "cpu")
        self.cpu = handle("cpu", "gpu")

    def start(self) -> None:
        self.gpu.start()
        self.cpu.start()

    async def close(self) -> None:
        await self.gpu.close()
        await self.cpu.close()

    @property
    def ready(self) -> bool:
        return self.gpu.ready and self.cpu.ready

    @property
    def epoch(self) -> int:
        """Rises with every death of a worker."""
        return self._assist.epoch

    def info(self) -> dict[str, Any]:
        """What each worker said when it became ready, and what the engine itself did."""
        return {
            "host_pool_seconds": self.pool_seconds,
            "host_pool_bytes": self._host_pool.nbytes,
            "gpu": {"pid": self.gpu.pid, **self.gpu.info},
            "cpu": {"pid": self.cpu.pid, **self.cpu.info},
        }

    def _died(self, role: str) -> None:
        """Voids the assist in flight, wakes the survivor, and starts a successor."""
        dead, survivor = (self.gpu, self.cpu) if role == "gpu" else (self.cpu, self.gpu)
        self._assist.raise_epoch()
        ring(survivor.channel.bell_down)
        self._on_death(role)
        dead.start()
