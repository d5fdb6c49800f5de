"""What makes a live engine do something at any pace: one side stands still, or dies, while the
statistics say how far the other has come."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dualpace import LLM, Output
from tests.servers import PATIENCE_S

Stats = dict[str, Any]

takes_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="ranks have a core each, and here is one"
)


def stats_of(llm: LLM) -> Stats:
    """With more patience than `llm.stats()` has."""
    return llm._loop.run(llm._client.stats(timeout_s=PATIENCE_S))


@contextmanager
def stopped(llm: LLM, role: str) -> Iterator[None]:
    """That side's workers stand still: what its engine has asked of them is a round without end."""
    pids = stats_of(llm)["workers"][role]["pids"]
    signal_all(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(pids, signal.SIGCONT)


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def ask(llm: LLM, prompts: Any, params: Any) -> Future[list[Output]]:
    """Answers that another thread waits for; who fails meanwhile does not."""
    answers: Future[list[Output]] = Future()

    def wait() -> None:
        try:
            answers.set_result(llm.generate(prompts, params))
        except Exception as error:  # for who wants the answers
            answers.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    return answers


def wait_until(llm: LLM, holds: Callable[[Stats], bool]) -> Stats:
    """The statistics once this holds of them."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds(stats := stats_of(llm)):
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    return stats


def is_idle(stats: Stats) -> bool:
    """Every block has come back: a copy may end after the last token."""
    return not (stats["gpu_blocks"]["used"] or stats["host_blocks"]["used"])


def slow_workers() -> dict[str, str]:
    """Settings of every live engine: SLOW_WORKERS in the environment gives all of them its pace."""
    return Workers.settings if "SLOW_WORKERS" in os.environ else {}


class Workers:
    """Orders to `worker`, which these settings make an engine start."""

    settings: ClassVar = {"runtime.worker_module": "tests.e2e.worker"}

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def copy_late(self) -> None:
        """From their start on."""
        (self._folder / "late-copies").touch()

    def die(self, **last_batches: int) -> None:
        """`die(gpu_0=40)`: that rank dies with its 40th batch from now on, once."""
        for name, batches in last_batches.items():
            self._order(name, "dies", batches)

    @contextmanager
    def failing(self, **top_k: int) -> Iterator[None]:
        """`failing(gpu_0=7)`: batches with a row that samples with this `top_k` raise there."""
        files = [self._order(name, "fails", number) for name, number in top_k.items()]
        try:
            yield
        finally:
            for file in files:
                file.unlink()

    @contextmanager
    def held(self, worker: str) -> Iterator[None]:
        """`held("cpu_0")`: if it starts meanwhile, it does not become ready."""
        file = self._order(worker, "held", 1)
        try:
            yield
        finally:
            file.unlink()

    def _order(self, worker: str, what: str, number: int) -> Path:
        """Whole when it is there."""
        file = self._folder / f"{worker.replace('_', '-')}.{what}"
        file.with_suffix(".new").write_text(str(number))
        return file.with_suffix(".new").rename(file)


@contextmanager
def orderly_workers(folder: Path) -> Iterator[Workers]:
    """To be had before the engine starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_WORKERS", str(folder))
        yield Workers(folder)
