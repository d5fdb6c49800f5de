"""The engine's side of one rank, without a process."""

import asyncio

from dualpace.runtime.channel import Channel, ChannelSize
from dualpace.runtime.engine.worker_handle import WorkerHandle
from dualpace.runtime.messages import StepDropped


def test_what_finds_a_full_mailbox_is_sent_in_order_when_there_is_room() -> None:
    channel = Channel.create("test", ChannelSize(3, 64, 3, 64))
    nothing = (lambda *_: None,) * 3
    handle = WorkerHandle("gpu", 1, "none", "", channel, {}, *nothing)

    async def talk() -> list[int]:
        taken: list[int] = []
        for number in range(8):
            handle.post(StepDropped(number))
        assert not channel.down.has_room()
        while len(taken) < 8:
            taken += [message.step for message in channel.down.take()]
            await asyncio.sleep(0)
        return taken

    assert asyncio.run(asyncio.wait_for(talk(), 30)) == list(range(8))
    channel.close()
