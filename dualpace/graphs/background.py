"""The second tier of a start: graphs built by a child process while the first tier serves.

A thread waits for the child, makes tables of what it built, and offers them to the stages, which
take them up between rounds. No round waits for any of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from dualpace.graphs.builder import BuildError, Builders
from dualpace.graphs.executor import Stages
from dualpace.graphs.job import Job
from dualpace.graphs.store import GraphStore, environment_key
from dualpace.graphs.table import StageTable

log = logging.getLogger(__name__)


class Background:
    """One build under way. `done` is set when its tables have been offered, or it has failed."""

    def __init__(
        self,
        job: Job,
        cache_dir: Path,
        tables: Callable[[GraphStore], dict[str, StageTable]],
        stages: Stages,
    ) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self._store = GraphStore(cache_dir, environment_key(job.threads))
        self._store.check()
        self._tables: Callable[[GraphStore], dict[str, StageTable]] | None = tables
        self._stages = stages
        self._builders = Builders(job, cache_dir, 1, background=True)
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name="graphs", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self._builders.wait()
            assert self._tables is not None
            for stage, table in self._tables(self._store).items():
                self._stages.offer(stage, table)
            log.info("compiled stages take over from the next round on")
        except (BuildError, OSError, RuntimeError) as error:
            self.error = error
            if not self._closed:
                log.error("stages stay uncompiled: %s", error)
        finally:
            self._tables = None  # it holds weights that may be needed no more
            self.done.set()

    def close(self) -> None:
        self._closed = True
        self._builders.close()
        self._thread.join()
