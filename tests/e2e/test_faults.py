"""Workers die, copies are late, signals arrive: answers stay the same, nothing is left behind."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dualpace.runtime.schedule.check import check_log
from tests.e2e.conftest import Mortal, Serve, settled
from tests.e2e.crowd import PARAMS, PROMPTS, TIGHT
from tests.e2e.server_process import Server, cmdline
from tests.servers import PATIENCE_S

Rounds = Callable[[], list[dict[str, Any]]]


def test_late_and_reordered_copies_change_nothing(
    serve: Serve, rounds: Rounds, undisturbed: list[list[int]]
) -> None:
    late = {"runtime.worker_module": "tests.e2e.faulty_worker"}
    with serve(**TIGHT["dualpace"], **late) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.token_ids for o in outputs] == undisturbed
    log = rounds()
    assert check_log(log) == []
    assert any(r["swap_out"] for r in log) and any(r["prefill_cpu"] for r in log)


@pytest.mark.parametrize(
    ("policy", "last_batches", "restarts"),
    [
        ("dualpace", {"gpu-0": 40, "cpu-0": 10}, [1, 1]),
        ("neo", {"gpu-0": 15, "cpu-0": 40}, [2, 1]),  # a round in lockstep ends with either
    ],
)
def test_workers_that_die_cost_no_answer(
    policy: str,
    last_batches: dict[str, int],
    restarts: list[int],
    serve: Serve,
    rounds: Rounds,
    undisturbed: list[list[int]],
    mortal: Mortal,
) -> None:
    dying = mortal(last_batches)
    with serve(**TIGHT[policy], **dying) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        stats = settled(llm)
    assert [o.token_ids for o in outputs] == undisturbed
    assert [stats["workers"][role]["restarts"] for role in ("gpu", "cpu")] == restarts
    log = rounds()
    assert check_log(log) == []
    assert any(r["preempted"] for r in log), "the accelerator had nothing to lose"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """When it has ended, as a test makes it, it has left nothing behind."""
    before = set(os.listdir("/dev/shm"))
    with Server(tmp_path / "log", "kv.gpu_blocks=8", "server.drain_timeout_s=0.5") as server:
        yield server
        server.wait_gone()
    deadline = time.monotonic() + PATIENCE_S
    while left := set(os.listdir("/dev/shm")) - before:  # of others' too, who end theirs
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert "Traceback" not in (tmp_path / "log").read_text()


def end_under_load(server: Server, end: Callable[[], None]) -> int:
    """The server's exit status after `end()`, while it streams to six clients."""
    streams = []
    for _ in range(6):
        started = threading.Event()
        thread = threading.Thread(target=_stream_until_cut, args=(server.url, started))
        thread.start()
        streams.append((thread, started))
    assert all(started.wait(PATIENCE_S) for _, started in streams)
    end()
    status = server.process.wait(PATIENCE_S)
    for thread, _ in streams:
        thread.join()
    return status


def _stream_until_cut(url: str, started: threading.Event) -> None:
    body = {"model": "random-tiny", "prompt": [1, 2, 3], "max_tokens": 2000, "stream": True}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    started.set()
    except httpx.TransportError:
        pass  # the server went away, as it was told to


def test_ready_tells_of_a_worker_that_is_stopped_and_of_one_that_starts_again(
    server: Server, tmp_path: Path
) -> None:
    """Nothing has been asked, so no answer shows it; the log says what happened and when. Then
    Ctrl-C under load, which a terminal sends to the whole group."""
    (worker,) = [pid for pid in server.family if "--role cpu" in " ".join(cmdline(pid))]
    os.kill(worker, signal.SIGSTOP)
    assert server.wait_ready_says("stalled") == "the cpu worker is stopped by a signal"
    os.kill(worker, signal.SIGCONT)
    assert server.wait_ready_says("ready") is None
    os.kill(worker, signal.SIGKILL)
    assert str(server.wait_ready_says("degraded")).startswith("cpu worker: ")
    assert httpx.get(f"{server.url}/ready").status_code == 200  # what fits HBM is served
    assert server.wait_ready_says("ready") is None
    server.note_family()
    assert end_under_load(server, lambda: server.signal_group(signal.SIGINT)) == 0
    lines = (tmp_path / "log").read_text().splitlines()
    for text in ("cpu worker ended with status -9", "the cpu worker is back after"):
        (line,) = [line for line in lines if text in line]
        assert re.match(r"\d\d:\d\d:\d\d [EI] engine: ", line)


def test_a_server_that_is_killed_under_load_leaves_nothing_behind(server: Server) -> None:
    """It alone, and it can tell nobody."""
    assert end_under_load(server, server.process.kill) == -signal.SIGKILL
