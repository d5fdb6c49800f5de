"""Command-line entry points. What takes long to import waits inside the functions: Ctrl-C finds a
handler before it, and `--help` and `--cfg` stay instant.
"""

import functools
import io
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from dualpace.errors import ConfigError

if TYPE_CHECKING:
    from dualpace.runtime.bench.config import PlotConfig
    from dualpace.settings.schema import (
        BenchConfig,
        ProfileHwConfig,
        ServeConfig,
        SimulateConfig,
    )

log = logging.getLogger(__name__)


def command(name: str, body: Callable[[Any], None]) -> None:
    """Runs a command (`command.run`). Outside of `body` there is nothing to end, so there Ctrl-C
    ends the process where it is: raised as KeyboardInterrupt it would come out of an import or of
    Hydra's parser as whatever they make of it."""
    inside = outside = signal.getsignal(signal.SIGINT)
    if inside is signal.default_int_handler:  # not where a shell lets its jobs ignore it
        outside = _end_at_once

    def guarded(config: Any) -> None:
        signal.signal(signal.SIGINT, inside)
        before = signal.getsignal(signal.SIGTERM)
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _leave)  # else what it began would stay
        try:
            body(config)
        finally:
            signal.signal(signal.SIGTERM, before)
            signal.signal(signal.SIGINT, outside)

    _open_standard_streams()
    signal.signal(signal.SIGINT, outside)
    try:
        from dualpace.command import run

        run(name, guarded)
    finally:
        signal.signal(signal.SIGINT, inside)


def _open_standard_streams() -> None:
    """Where some are closed (`2>&-`): else a socket would have such a number, and be written to.
    And text that stdout has no letters for is escaped, as on stderr."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            setattr(sys, name, open(opened, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of models may be more than it can spell
        sys.stdout.reconfigure(errors="backslashreplace")


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _end_at_once(number: int, frame: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def serve() -> None:
    """Serves a model over HTTP until stopped."""
    command("serve", _serve)


def _serve(config: "ServeConfig") -> None:
    from dualpace.settings.resolve import resolve

    plan = resolve(config)
    for line in plan.lines():
        log.info("plan %s", line)
    from dualpace.runtime.server import serve as run_server

    run_server(plan)


def doctor() -> None:
    """Reports on the machine; exit code 1 if the configuration cannot be served here."""
    as_json = "--json" in sys.argv
    if as_json:
        sys.argv.remove("--json")
    command("doctor", functools.partial(_doctor, as_json=as_json))


def _doctor(config: "ServeConfig", as_json: bool) -> None:
    from dualpace.doctor import run

    if not run(config, as_json):
        raise SystemExit(1)


def simulate() -> None:
    """Plays a workload against a policy on a simulated machine."""
    command("simulate", _simulate)


def _simulate(config: "SimulateConfig") -> None:
    from dualpace.runtime.simulate.report import print_report
    from dualpace.runtime.simulate.run import simulate as run

    print_report(run(config))


def bench() -> None:
    """Puts a workload to a server and measures what its clients see."""
    command("bench", _bench)


def _bench(config: "BenchConfig") -> None:
    from dualpace.runtime.bench.report import print_report

    try:
        from dualpace.runtime.bench.run import bench as run
    except ModuleNotFoundError as error:  # serving needs no HTTP client
        raise ConfigError(
            f"bench needs {error.name}: pip install 'dualpace[bench]' ({error})."
        ) from None

    for result in run(config, shlex.join(["python", *sys.argv])):
        print_report(result)


def profile_hw() -> None:
    """Measures this machine and fits the settings that depend on it."""
    command("profile_hw", _profile_hw)


def _profile_hw(config: "ProfileHwConfig") -> None:
    from dualpace.runtime.profile.run import run

    run(config)


def plot() -> None:
    """Draws the paper's figures from result files."""
    command("plot", _plot)


def _plot(config: "PlotConfig") -> None:
    from dualpace.runtime.bench.plot import plot as run

    run(config)
