"""The worker with copies that come late and out of order: `runtime.worker_module` for a test."""

import queue
import random
import threading
import time

from dualpace.runtime.worker.copies import CopyEngine, CopyJob
from dualpace.runtime.worker.main import main


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
    main(copy_engine=LateCopies)
