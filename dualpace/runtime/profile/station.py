"""Both workers for a process that measures: the GPU worker as a process of its own, the CPU worker
here, between them the memory and bells that an engine would give them."""

import socket
from functools import cached_property

from dualpace.runtime.assist import AssistBuffer
from dualpace.runtime.channel import Channel
from dualpace.runtime.engine.pair import RanksMemory
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.batches import BatchMaker
from dualpace.runtime.profile.host import HostWorker
from dualpace.runtime.profile.peer import GpuPeer
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wiring import assist_layout, channel_size, host_pool_bytes
from dualpace.runtime.worker.link import Link


class Station:
    """Each worker is made when it is first used, so that a point pays for what it needs."""

    def __init__(self, plan: Plan, temperature: float) -> None:
        self.plan = plan
        self._host_pool = SharedRegion.create("host KV pool", host_pool_bytes(plan))
        layout = assist_layout(plan)
        self._assist = SharedRegion.create("assist buffer", layout.nbytes)
        size = channel_size(plan, "gpu")
        self._gpu_channels = [Channel.create("gpu channel", size) for _ in range(plan.gpu.tp)]
        self._gpu_ranks = RanksMemory(self._gpu_channels)
        self._cpu_channel = Channel.create("cpu channel", channel_size(plan, "cpu"))
        self._ours, self._theirs = socket.socketpair()  # the CPU worker's lifeline
        self.batches = BatchMaker(
            plan.model.vocab, plan.kv.gpu_pool_blocks, plan.kv.host_pool_blocks, temperature
        )

    @cached_property
    def gpu(self) -> GpuPeer:
        shared = {
            "other_bell_0": self._cpu_channel.bell_down,
            "assist": self._assist.fd,
            "host_pool": self._host_pool.fd,
            **self._gpu_ranks.fds,
        }
        return GpuPeer(self.plan, self._gpu_channels, shared)

    @cached_property
    def cpu(self) -> HostWorker:
        buffer = AssistBuffer(self._assist, assist_layout(self.plan))
        pool = self._host_pool.view
        bells = [channel.bell_down for channel in self._gpu_channels]
        link = Link(self._cpu_channel, self._theirs, buffer, pool, bells)
        return HostWorker(self.plan, link, self._cpu_channel)

    def close(self) -> None:
        if "gpu" in self.__dict__:
            self.gpu.close()
        self._ours.close()
        self._theirs.close()
