"""Both workers for a process that measures: the GPU worker's ranks as processes of their own, of
the CPU worker the first rank here and the others in processes like this one (`follower`), between
them the memory and bells that an engine would give them."""

import json
import socket
from functools import cached_property

from dualpace.runtime.channel import Channel
from dualpace.runtime.engine.pair import RanksMemory
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.batches import BatchMaker
from dualpace.runtime.profile.host import HostWorker, RankLink
from dualpace.runtime.profile.peer import GpuPeer, RankProcess, fds_of
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wiring import (
    assist_layout,
    assist_stretches,
    channel_size,
    host_pool_bytes,
    host_pool_stretches,
    ranks_of,
)

FOLLOWER = "dualpace.runtime.profile.follower"


class Station:
    """Each worker is made when it is first used, so that a point pays for what it needs."""

    def __init__(self, plan: Plan, temperature: float, order: str = "") -> None:
        """order: what followers are told, where the CPU has several ranks."""
        self.plan, self._order = plan, order
        self._host_pool = SharedRegion.create(
            "host KV pool", host_pool_bytes(plan), huge=True, near=host_pool_stretches(plan)
        )
        self._assist = SharedRegion.create(
            "assist buffer", assist_layout(plan).nbytes, near=assist_stretches(plan)
        )
        self.channels = {
            role: [
                Channel.create(f"{role} channel", channel_size(plan, role))
                for _ in range(ranks_of(plan, role))
            ]
            for role in ("gpu", "cpu")
        }
        self._ranks = {role: RanksMemory(channels) for role, channels in self.channels.items()}
        self._ours, self._theirs = socket.socketpair()  # the CPU worker's lifeline
        self._followers: list[RankProcess] = []
        self.batches = batch_maker(plan, temperature)

    def fds(self, role: str, other: str) -> dict[str, int]:
        """What the ranks of one side are given."""
        bells = {f"other_bell_{n}": c.bell_down for n, c in enumerate(self.channels[other])}
        shared = {"assist": self._assist.fd, "host_pool": self._host_pool.fd}
        return {**shared, **self._ranks[role].fds, **bells}

    @cached_property
    def gpu(self) -> GpuPeer:
        return GpuPeer(self.plan, self.channels["gpu"], self.fds("gpu", "cpu"))

    @cached_property
    def cpu(self) -> HostWorker:
        fds, (own, *others) = self.fds("cpu", "gpu"), self.channels["cpu"]
        for rank, channel in enumerate(others, start=1):
            self._followers.append(RankProcess(FOLLOWER, [], rank, channel, fds, self._order))
        link = RankLink.attach(self.plan, "cpu", 0, json.dumps(fds_of(own, fds)), self._theirs)
        assert isinstance(link, RankLink)
        link.others = [follower.process for follower in self._followers]
        return HostWorker(self.plan, link)

    def close(self) -> None:
        if "gpu" in self.__dict__:
            self.gpu.close()
        for follower in self._followers:
            follower.close()
        self._ours.close()
        self._theirs.close()


def batch_maker(plan: Plan, temperature: float) -> BatchMaker:
    """Every rank makes the same batches."""
    return BatchMaker(
        plan.model.vocab, plan.kv.gpu_pool_blocks, plan.kv.host_pool_blocks, temperature
    )
