"""A form may do what it likes in its trial: no other is kept from being answered, and no process is
left."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from dualpace.runtime.engine import trials as trials_module
from dualpace.runtime.engine.forms import FormRefused, Forms, FormsBusy
from dualpace.runtime.engine.trials import HostedTrials
from dualpace.runtime.plan import ModelPlan
from dualpace.runtime.structured import Structure
from tests.runtime.engine.forms_case import SevensCompiler
from tests.servers import PATIENCE_S

PLAYED = "tests.runtime.engine.played_host"
MODEL = ModelPlan(
    source="smollm2",
    name="smollm2",
    dtype="float32",
    seed=0,
    max_context=64,
    num_layers=1,
    hidden=16,
    num_q_heads=1,
    num_kv_heads=1,
    head_dim=16,
    vocab=49152,
    eos_token_ids=(2, 0),
)
Story = Callable[[HostedTrials], Coroutine[Any, Any, None]]


def children(pid: int) -> list[int]:
    """Processes that it started and that have not ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(place.name))
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.05)


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Children find the tests, and none is left."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    before = children(os.getpid())
    yield
    assert set(children(os.getpid())) <= set(before)


def play(story: Story, module: str = PLAYED, **limits: Any) -> None:
    async def run() -> None:
        trials = HostedTrials(MODEL, module=module, **limits)
        try:
            await asyncio.wait_for(story(trials), PATIENCE_S)
        finally:
            trials.close()

    asyncio.run(run())


def host_of(trials: HostedTrials) -> int:
    assert trials._host is not None
    return trials._host._process.pid


async def trial_of(trials: HostedTrials, text: str) -> tuple["asyncio.Task[None]", int]:
    """One that runs, and its process."""
    await trials.start()
    task = asyncio.create_task(trials.attempt("regex", text))
    await until(lambda: children(host_of(trials)))
    (pid,) = children(host_of(trials))
    return task, pid


def test_forms_that_crash_or_take_all_time_or_memory_end_nothing_else() -> None:
    nested = "(" * 20_000 + "a" + ")" * 20_000  # no request may: past what the library can take
    bad = {
        ("json", f'{{"type": "string", "pattern": "{nested}"}}'): "fails at it (its process was",
        ("regex", "a?" * 250): "it takes more than 0.5 s to compile: make it simpler",
        ("json", '{"type": "array", "items":' * 3000 + "{}" + "}" * 3000): "too much memory, make",
        ("regex", "(a"): "the regular expression cannot be compiled: regex parsing error",
    }

    async def story(trials: HostedTrials) -> None:
        compiler = SevensCompiler()  # here: the real one is in the trials
        forms = Forms(lambda: compiler, trials, queue_limit_s=PATIENCE_S)
        for (kind, text), why in bad.items():
            trials._limit_s = 0.5 if "0.5 s" in why else PATIENCE_S
            for _ in range(2):  # the second time it is known
                with pytest.raises(FormRefused, match=why.replace("(", r"\(")):
                    await forms.guide(Structure(kind, text, "here"))
        assert (await forms.guide(Structure("regex", "1 9", "here"))).allows(1)
        assert compiler.compiled == ["1 9"]
        assert next(trials._numbers) == len(bad) + 1
        host = host_of(trials)
        assert children(host) == []
        forms.close()
        assert not runs(host)

    play(story, trials_module._HOST, limit_bytes=128 << 20)


def test_how_a_trial_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def story(trials: HostedTrials) -> None:
        await trials.attempt("regex", "1 9")
        for text, why in {
            "abort": r"its process was ended by signal SIGABRT\)",
            "bad": "^it is bad$",
            "broken": "the server's log says more",
            "hang": "more than 0.1 s",
        }.items():
            trials._limit_s = 0.1 if text == "hang" else PATIENCE_S
            with pytest.raises(FormRefused, match=why):
                await trials.attempt("regex", text)
        with pytest.raises(FormsBusy, match="as where memory runs out"):
            await trials.attempt("regex", "killed")

    play(story, limit_s=PATIENCE_S)
    assert "(regex of 5 characters) was ended by signal SIGABRT" in caplog.text


def test_a_lost_host_is_replaced_and_its_trials_are_gone(caplog: pytest.LogCaptureFixture) -> None:
    async def story(trials: HostedTrials) -> None:
        task, first = await trial_of(trials, "hang")
        lost = host_of(trials)
        os.kill(lost, signal.SIGKILL)  # with the trial, which another makes again
        await until(lambda: host_of(trials) != lost and children(host_of(trials)))
        await until(lambda: not runs(first))
        os.kill(host_of(trials), signal.SIGKILL)
        with pytest.raises(FormsBusy, match="send it again"):
            await task
        await trials.attempt("regex", "1 9")

    with caplog.at_level(logging.WARNING):
        play(story, limit_s=PATIENCE_S)
    assert "the process that tries forms was ended by signal SIGKILL" in caplog.text


def test_a_host_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials_module, "_ANSWER_LIMIT_S", 0.1 - PATIENCE_S)

    async def story(trials: HostedTrials) -> None:
        with pytest.raises(FormsBusy, match="send it again"):
            await trials.attempt("regex", "stop")

    play(story, limit_s=PATIENCE_S)


def test_where_no_host_starts_forms_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def story(trials: HostedTrials) -> None:
        await trials.start()
        with pytest.raises(FormsBusy, match="send it again"):
            await trials.attempt("regex", "1 9")

    play(story, "dualpace.errors")  # ends at once
    assert caplog.text.count("the process that tries forms ended with status 0") == 3


def test_a_trial_ends_with_who_waits_for_it() -> None:
    async def story(trials: HostedTrials) -> None:
        task, pid = await trial_of(trials, "hang")
        task.cancel()
        await until(lambda: not runs(pid))
        await trials.attempt("regex", "1 9")
        task, pid = await trial_of(trials, "hang")
        trials.close()
        await until(lambda: not runs(pid))
        with pytest.raises(FormsBusy):
            await task

    play(story, limit_s=PATIENCE_S)
