"""The worker that dies once, amid its work: `runtime.worker_module` for a test.

A file ROLE-RANK in the folder that the environment names in MORTAL_WORKERS says which batch is its
last. It dies when it next waits: the accelerator between two stages of a round, the host's worker
within an iteration that asks for an assist. Its successor finds no file, and lives.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from dualpace.runtime.wire import Message
from dualpace.runtime.worker import link, main


def mortal(kind: type[link.Link], last_batch: int) -> type[link.Link]:
    """That kind of link, whose process dies with the batch of this number."""

    class Mortal(kind):  # type: ignore[valid-type, misc]
        batches = 0

        def receive(self) -> Iterator[Message]:
            for message in super().receive():
                self.batches += 1
                yield message

        def wait(self, block: bool) -> None:
            if self.batches >= last_batch:
                os.kill(os.getpid(), signal.SIGKILL)
            super().wait(block)

    return Mortal


if __name__ == "__main__":
    role, rank = (sys.argv[sys.argv.index(f"--{name}") + 1] for name in ("role", "rank"))
    order = Path(os.environ["MORTAL_WORKERS"]) / f"{role}-{rank}"
    if order.exists():
        last_batch = int(order.read_text())
        order.unlink()
        main.Link = mortal(link.Link, last_batch)  # type: ignore[misc]
        link.FollowerLink = mortal(link.FollowerLink, last_batch)  # type: ignore[misc, assignment]
    main.main()
