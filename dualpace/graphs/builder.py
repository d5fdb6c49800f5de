"""A child process that compiles a job's graphs into the store and times the candidates.

Several of them share the work of one job through the store. A line on its output tells each step;
it ends when its input closes, so it never outlives who started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dualpace.graphs.job import Job, compile_all
from dualpace.graphs.store import GraphStore, environment_key
from dualpace.graphs.tuner import tune_all

Report = Callable[[int, int], None]  # steps done so far, steps in all


class BuildError(RuntimeError):
    """A build process ended without having done its work; its output says why."""


def build_all(job: Job, store: GraphStore) -> Iterator[tuple[str, int]]:
    """Every graph, then the times where there is a choice, here in this process."""
    is_choice = len(job.candidates) > 1
    yield from compile_all(job, store, wait=not is_choice)
    if is_choice:
        yield from tune_all(job, store)  # waits for a graph that is not there yet
    store.write_note(job.done_name(), {"candidates": job.candidates})


def num_steps(job: Job) -> int:
    return len(job.pairs()) * (2 if len(job.candidates) > 1 else 1)


class Builders:
    """Child processes at work on one job."""

    def __init__(self, job: Job, cache_dir: Path, count: int, background: bool = False) -> None:
        """background: at the lowest priority, for a process that serves meanwhile."""
        self._total = num_steps(job)
        # The thread count is part of the code and fixed when torch is imported.
        environment = os.environ | {"OMP_NUM_THREADS": str(job.threads)}
        command = [sys.executable, "-m", "dualpace.graphs.builder"]
        order = {"job": job.to_json(), "cache_dir": str(cache_dir), "nice": 19 * background}
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            for _ in range(count)
        ]
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()

    def wait(self, report: Report | None = None) -> None:
        """Until the job is done. BuildError if a process fails."""
        first = self._processes[0]
        assert first.stdout is not None
        for line in first.stdout:
            if report is not None:
                report(int(line), self._total)
        for process in self._processes:
            if process.wait() != 0:
                raise BuildError(f"a build process ended with status {process.returncode}")

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def best_count(job: Job, num_cores: int) -> int:
    """Build processes that shorten the start: a core each, and some graphs each."""
    return max(1, min(num_cores, 8, len(job.pairs()) // 3))


def main() -> None:
    """The child's life: one order on its input."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.nice(order["nice"])
    import torch

    job = Job.from_json(order["job"])
    torch.set_num_threads(job.threads)
    store = GraphStore(Path(order["cache_dir"]), environment_key(job.threads))
    for done, _ in enumerate(build_all(job, store), start=1):
        print(done, flush=True)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
