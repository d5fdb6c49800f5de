"""`python -m dualpace.runtime.engine.trial_host`: compiles forms for trial, each in a process of
its own, so that one may crash or take its time or all memory, and nobody else does.

The processes are forked from this one, which has loaded what compiling takes; that makes a trial
cost a millisecond. What a trial has compiled ends with it. Never started by a person.
"""

import argparse
import gc
import json
import os
import resource
import select
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from dualpace.runtime.engine.compiler import XgrammarCompiler
from dualpace.runtime.engine.forms import Compiler, FormRefused
from dualpace.runtime.messages import Hello, Ready
from dualpace.runtime.plan import ModelPlan
from dualpace.runtime.process import become_child, receive, send
from dualpace.runtime.wire import Message

# Of a trial: engine and workers come first. On two cores that four workers' threads and others kept
# busy, two trials made answers take 3 times as long at 5 and 1.4 times at 10.
_NICENESS = 10
_USUAL_STACK = 2 << 20  # bytes of a thread's where no limit is set


@dataclass(slots=True)
class Try(Message, kind=40):
    """To the host: a form, of `structured.Structure`."""

    number: int
    way: str  # its kind
    text_json: str  # any text, lone surrogates too
    limit_s: float
    limit_bytes: int  # beyond what the host has


@dataclass(slots=True)
class Stop(Message, kind=41):
    """To the host: nobody waits for a trial, which may have ended."""

    number: int


@dataclass(slots=True)
class Tried(Message, kind=42):
    """How a trial's process ended, as subprocess has it: 0, compiled, or not for the `refusal`;
    above, an exception that the log tells; below, by a signal, SIGALRM for out of time."""

    number: int
    status: int
    refusal: str


class _Host:
    def __init__(self, compiler: Compiler, lifeline: socket.socket) -> None:
        self._compiler = compiler
        self._lifeline = lifeline
        self._pids: dict[int, int] = {}  # of trials that run, by number
        self._selector = selectors.DefaultSelector()
        self._selector.register(lifeline, selectors.EVENT_READ, self._hear)

    def run(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _hear(self) -> None:
        match receive(self._lifeline):
            case Try() as trial:
                self._begin(trial)
            case Stop(number):
                if number in self._pids:
                    os.kill(self._pids[number], signal.SIGKILL)
            case message:
                raise AssertionError(f"unexpected {type(message).__name__} from the engine")

    def _begin(self, trial: Try) -> None:
        ours, theirs = os.pipe()
        host = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._lifeline.close()
            _try(self._compiler, trial, theirs, host)
        os.close(theirs)
        self._pids[trial.number] = pid
        end = partial(self._ended, trial.number, ours)
        self._selector.register(ours, selectors.EVENT_READ, end)

    def _ended(self, number: int, pipe: int) -> None:
        refusal = os.read(pipe, select.PIPE_BUF)  # in one piece, or nothing and the process is gone
        self._selector.unregister(pipe)
        os.close(pipe)
        _, status = os.waitpid(self._pids.pop(number), 0)
        status = os.waitstatus_to_exitcode(status)
        send(self._lifeline, Tried(number, status, refusal.decode(errors="ignore")))


def _try(compiler: Compiler, trial: Try, pipe: int, host: int) -> NoReturn:
    """The child: all of it, whatever happens."""
    status = 1
    try:
        become_child(host, ignore_signals=False)
        _limit(trial)
        compiler.compile(trial.way, json.loads(trial.text_json)).guide()
        status = 0
    except FormRefused as error:
        os.write(pipe, str(error).encode(errors="replace")[: select.PIPE_BUF])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _limit(trial: Try) -> None:
    """What does not fit is met here, before the engine meets it: hence a smaller stack than that of
    a thread there."""
    os.nice(_NICENESS)
    with suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory ends, this goes first
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _USUAL_STACK if stack == resource.RLIM_INFINITY else stack
    for what, nbytes in (
        (resource.RLIMIT_AS, has + trial.limit_bytes),
        (resource.RLIMIT_STACK, stack // 2),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(what)
        if most != resource.RLIM_INFINITY:
            nbytes = min(nbytes, most)
        resource.setrlimit(what, (nbytes, nbytes))
    signal.setitimer(signal.ITIMER_REAL, trial.limit_s)


def _model(text: str) -> ModelPlan:
    values = json.loads(text)
    return ModelPlan(**values | {"eos_token_ids": tuple(values["eos_token_ids"])})


def main(compiler: Callable[[ModelPlan], Compiler] = XgrammarCompiler) -> None:
    """Runs until the lifeline closes. `compiler(model)` is loaded once (tests bring their own)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    become_child(arguments.parent, ignore_signals=True)
    lifeline = socket.socket(fileno=arguments.lifeline)
    try:
        hello = receive(lifeline)
        assert isinstance(hello, Hello)
        host = _Host(compiler(_model(hello.plan)), lifeline)
        gc.collect()
        gc.freeze()  # else a collection in a trial would copy what it shares with this process
        send(lifeline, Ready(""))
        host.run()
    except FormRefused as error:  # the engine has met the same
        sys.exit(f"no form can be tried: {error}")
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # at once: nothing here is worth the time that torch takes to end


if __name__ == "__main__":
    main()
