"""Forms tried in processes that can be ended, before the engine compiles them: the engine's side.

A form that crashes the library would end the engine, and one that keeps it busy a thread, which
cannot be ended. Knows no requests and keeps no forms.
"""

import asyncio
import itertools
import json
import logging
import os
import signal
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from dualpace.runtime.connection import Connection
from dualpace.runtime.engine.compiler import XgrammarCompiler
from dualpace.runtime.engine.forms import FormRefused, Forms, FormsBusy
from dualpace.runtime.engine.trial_host import Stop, Tried, Try
from dualpace.runtime.messages import Hello, Ready
from dualpace.runtime.plan import ModelPlan
from dualpace.runtime.process import ending, send, start_process
from dualpace.runtime.wire import Message

log = logging.getLogger(__name__)

_HOST = "dualpace.runtime.engine.trial_host"
# It forks, and only the thread that does lives on in the child.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_LIMIT_S = 30.0  # of a trial
_LIMIT_BYTES = 1 << 30  # the largest forms that end in time take a tenth of it
_START_LIMIT_S = 120.0
_ANSWER_LIMIT_S = 10.0  # of a host, beyond the trial's limit
_MAX_HOSTS = 2  # that are lost with one form: no form ends them, so it is not to blame


def forms_by_trial(model: ModelPlan) -> Forms:
    return Forms(partial(XgrammarCompiler, model), HostedTrials(model))


class HostLost(Exception):
    """The process that tries forms is not there any more."""


class HostedTrials:
    """`forms.Trials`. Starts a process that tries forms when the first comes, and another when that
    is lost. Its methods are called on the event loop of the main thread."""

    def __init__(
        self,
        model: ModelPlan,
        limit_s: float = _LIMIT_S,
        limit_bytes: int = _LIMIT_BYTES,
        module: str = _HOST,
    ) -> None:
        self._model = model
        self._limit_s = limit_s
        self._limit_bytes = limit_bytes
        self._module = module
        self._numbers = itertools.count()
        self._host: _Host | None = None
        self._is_closed = False

    async def start(self) -> None:
        try:
            await self._running().ready()
        except HostLost as error:
            log.warning("forms cannot be tried: %s", error)

    async def attempt(self, kind: str, text: str) -> None:
        limits = self._limit_s, self._limit_bytes
        trial = Try(next(self._numbers), kind, json.dumps(text), *limits)
        for _ in range(_MAX_HOSTS):
            try:
                tried = await self._running().attempt(trial)
            except HostLost as error:
                log.warning("a form's trial is lost: %s", error)
                continue
            if tried.status < 0:
                what = kind, len(text), ending(tried.status)
                log.warning("a form's trial (%s of %d characters) %s", *what)
            self._judge(tried)
            return
        raise FormsBusy("forms cannot be tried now, the server's log says why: send it again later")

    def _judge(self, tried: Tried) -> None:
        """Raises FormRefused if it is to be."""
        if tried.refusal:
            raise FormRefused(tried.refusal)
        if tried.status == -signal.SIGALRM:
            raise FormRefused(f"it takes more than {self._limit_s:g} s to compile: make it simpler")
        if tried.status == -signal.SIGKILL:  # it was not the form itself
            what = "its trial was ended from outside, as where memory runs out"
            raise FormsBusy(f"{what}: make it simpler, or send it again later")
        if tried.status < 0:
            what = f"the library fails at it (its process {ending(tried.status)})"
            raise FormRefused(f"it cannot be compiled, {what}: make it simpler")
        if tried.status > 0:
            raise FormRefused("it could not be compiled: the server's log says more")

    def _running(self) -> "_Host":
        if self._is_closed:
            raise HostLost("the engine ends")
        if self._host is None or self._host.is_lost:
            try:
                self._host = _Host(self._module, self._model)
            except OSError as error:
                raise HostLost(f"no process can be started ({error})") from None
        return self._host

    def close(self) -> None:
        """Ends what runs, at once."""
        self._is_closed = True
        if self._host is not None:
            self._host.close()


class _Host:
    """One process."""

    def __init__(self, module: str, model: ModelPlan) -> None:
        """Raises OSError if there is none to be had."""
        loop = asyncio.get_running_loop()
        self.is_lost = False
        self._why_lost = ""
        self._process, sock = start_process(module, [], [], _ONE_THREAD)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self.close)
        with suppress(OSError):  # it has ended already: the loop hears of it
            send(sock, Hello(json.dumps(asdict(model))))
        self._opening = loop.create_task(Connection.open(sock, self._hear, lambda: None))
        self._ready: asyncio.Future[None] = loop.create_future()
        self._answers: dict[int, asyncio.Future[Tried]] = {}

    async def ready(self) -> None:
        await self._wait(self._ready, _START_LIMIT_S)
        if self.is_lost:
            raise HostLost(self._why_lost)

    async def attempt(self, trial: Try) -> Tried:
        """May be cancelled; then the trial ends."""
        await self.ready()
        answer: asyncio.Future[Tried] = asyncio.get_running_loop().create_future()
        self._answers[trial.number] = answer
        self._say(trial)
        try:
            await self._wait(answer, trial.limit_s + _ANSWER_LIMIT_S)
            return answer.result()
        finally:
            del self._answers[trial.number]
            if not answer.done():
                self._say(Stop(trial.number))

    async def _wait(self, future: "asyncio.Future[Any]", limit_s: float) -> None:
        """Raises HostLost, also where it says nothing for so long."""
        await asyncio.wait({future}, timeout=limit_s)
        if not future.done():
            self.close(f"no word from it for {limit_s:g} s")
        if future.cancelled():  # as all are when it is lost
            raise HostLost(self._why_lost)

    def _hear(self, message: Message) -> None:
        match message:
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(None)
            case Tried() if message.number in self._answers:
                self._answers[message.number].set_result(message)

    def _say(self, message: Message) -> None:
        if not self.is_lost:
            self._opening.result().send(message)

    def close(self, why: str = "") -> None:
        """Ends it, if it has not ended, and with it its trials. Once or more."""
        if self.is_lost:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.kill()
        status = self._process.wait()
        self.is_lost = True
        self._why_lost = why or f"the process that tries forms {ending(status)}"
        if self._opening.done():
            self._opening.result().close()
        self._opening.cancel()
        futures: list[asyncio.Future[Any]] = [self._ready, *self._answers.values()]
        for future in futures:
            future.cancel()
