"""An engine that cannot start for a reason that its user can fix says so to its owner."""

import asyncio
import socket
from typing import Any

import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.engine.__main__ import serve
from dualpace.runtime.engine.pair import WorkerPair
from dualpace.runtime.messages import Failed
from dualpace.runtime.process import receive
from dualpace.settings.resolve import resolve
from tests.tiny_settings import settings

SMALL = (
    "kv.gpu_blocks=12",
    "kv.host_blocks=64",
    "gpu.max_batch_size=32",
    "cpu.max_batch_size=32",
)
SENTENCE = "host KV pool needs more memory; lower kv.host_blocks"


def refuse(*_: Any) -> None:
    raise ConfigError(SENTENCE)


async def refuse_late(*_: Any) -> None:
    refuse()


@pytest.mark.parametrize("where, how", [("__init__", refuse), ("start", refuse_late)])
def test_the_owner_hears_why(where: str, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is taken while workers start, long after the engine has begun to talk."""

    async def close(*_: Any) -> None:
        """There is nothing."""

    monkeypatch.setattr(WorkerPair, where, how)
    monkeypatch.setattr(WorkerPair, "close", close)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert asyncio.run(serve(resolve(settings(*SMALL)), theirs)) == 1
        assert receive(ours) == Failed(SENTENCE, user_error=1)
