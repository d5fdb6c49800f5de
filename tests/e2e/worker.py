"""The worker as tests want it: `runtime.worker_module`, with orders in files and a pace.

TEST_WORKERS names a folder of orders, which hold from when they are there:

    gpu-0.dies   N: the process of that role and rank dies with the Nth batch that it gets from then
                 on in hand: when it next waits (the accelerator between two stages of a round, the
                 host within an iteration that asks for an assist), at the latest when it would say
                 that it is done. Its successor lives.
    cpu-0.fails  K: a batch raises as it is taken, if a row in it samples with this top_k
    cpu-0.held   it does not become ready while there is this file
    late-copies  from the start: copies end late and out of order

SLOW_WORKERS=cpu:20,gpu:5 makes each batch of a role take so many milliseconds longer. The times
of a layer, by which policies judge, are told, not measured.
"""

import json
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dualpace.runtime.messages import Ready, StepDone
from dualpace.runtime.wire import Message
from dualpace.runtime.worker import link, main
from dualpace.runtime.worker.copies import CopyEngine, CopyJob

ROLE, RANK = (sys.argv[sys.argv.index(f"--{name}") + 1] for name in ("role", "rank"))
ORDERS = Path(os.environ.get("TEST_WORKERS", "/no orders"))
PACES = dict(pair.split(":") for pair in os.environ.get("SLOW_WORKERS", "").split(",") if pair)
BATCH_S = float(PACES.get(ROLE, 0)) / 1e3
# A step is all that costs, however many rows it has: host rows always pay.
LAYER_TIMES = {
    "gpu": {
        "post_layer": [[1, 1e-3]],
        "linear": [[1, 1e-9]],
        "decode": [[1, 0.0]],
        "prefill": [[1, 0.0]],
    },
    "cpu": {part: [[1, 0.0]] for part in ("host", "host_pre", "host_post", "host_post_layer")},
}


def ordered(kind: type[link.Link]) -> type[link.Link]:
    """That kind of link, which does as the orders say."""

    class Ordered(kind):  # type: ignore[valid-type, misc]
        left: int | None = None  # batches until the last one

        def receive(self) -> Iterator[Message]:
            for message in super().receive():
                time.sleep(BATCH_S)
                dies = ORDERS / f"{ROLE}-{RANK}.dies"
                if self.left is None and dies.exists():
                    self.left = int(dies.read_text())
                    dies.unlink()
                if self.left is not None:
                    self.left -= 1
                fails = ORDERS / f"{ROLE}-{RANK}.fails"
                if fails.exists() and (top_k := int(fails.read_text())) in message.top_k:
                    raise RuntimeError(f"no kernel survives top_k={top_k}")
                if ROLE == "cpu" and self.lockstep is not None:
                    self._die_if_due()  # with the last answer it is done, and says nothing
                yield message

        def wait(self, block: bool) -> None:
            self._die_if_due()
            super().wait(block)

        def send(self, message: Message) -> None:
            if isinstance(message, StepDone):
                self._die_if_due()
            if isinstance(message, Ready):
                while (ORDERS / f"{ROLE}-{RANK}.held").exists():
                    self.check_lifeline()
                    time.sleep(0.01)
                message = told(message)
            super().send(message)

        def _die_if_due(self) -> None:
            if self.left is not None and self.left <= 0:  # two may have come at once
                os.kill(os.getpid(), signal.SIGKILL)

    return Ordered


def told(ready: Ready) -> Ready:
    info = json.loads(ready.info)
    if info["layer_times"]:
        info["layer_times"] = LAYER_TIMES[ROLE]
    return replace(ready, info=json.dumps(info))


class LateCopies(CopyEngine):
    """Holds up to three copies back and lets a random one of them go, up to 20 ms late."""

    def __init__(self, doorbell: int) -> None:
        super().__init__(doorbell)
        self._held: queue.SimpleQueue[CopyJob] = queue.SimpleQueue()
        threading.Thread(target=self._release, daemon=True).start()

    def dispatch(self, job: CopyJob) -> None:
        self._held.put(job)

    def _release(self) -> None:
        rng = random.Random(0)
        held: list[CopyJob] = []
        while True:
            if not held or (len(held) < 3 and not self._held.empty()):
                held.append(self._held.get())
                continue
            time.sleep(rng.random() * 0.02)
            super().dispatch(held.pop(rng.randrange(len(held))))


if __name__ == "__main__":
    main.Link = ordered(link.FollowerLink if int(RANK) else link.Link)  # type: ignore[misc]
    late = (ORDERS / "late-copies").exists()
    main.main(copy_engine=LateCopies if late else CopyEngine)
