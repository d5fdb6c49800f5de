"""The worker that meets an exception: `runtime.worker_module` for a test.

A row is deadly that samples with one of these `top_k`; whichever batch it is in raises as it is
taken, on the rank of that role that the test has named in FAILING_RANKS.
"""

import os
import sys
from collections.abc import Iterator

from dualpace.runtime.messages import CpuBatch, GpuBatch
from dualpace.runtime.wire import Message
from dualpace.runtime.worker import link, main

DEADLY = {"gpu": 777, "cpu": 778}  # top_k, by the role that does not survive it


def failing(kind: type[link.Link], top_k: int) -> type[link.Link]:
    """That kind of link, which raises as it takes a batch with such a row."""

    class Failing(kind):  # type: ignore[valid-type, misc]
        def receive(self) -> Iterator[Message]:
            for message in super().receive():
                assert isinstance(message, GpuBatch | CpuBatch)
                if top_k in message.top_k:
                    raise RuntimeError(f"no kernel survives top_k={top_k}")
                yield message

    return Failing


if __name__ == "__main__":
    role, rank = (sys.argv[sys.argv.index(f"--{name}") + 1] for name in ("role", "rank"))
    if f"{role}-{rank}" in os.environ["FAILING_RANKS"].split(","):
        main.Link = failing(link.Link, DEADLY[role])  # type: ignore[misc]
        link.FollowerLink = failing(link.FollowerLink, DEADLY[role])  # type: ignore[misc, assignment]
    main.main()
