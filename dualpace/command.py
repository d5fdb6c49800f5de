"""A command's run: Hydra at the edge, one ConfigError sentence instead of a traceback. Knows
nothing about what the commands do.
"""

import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dualpace.errors import ConfigError
from dualpace.settings.check import check
from dualpace.settings.compose import as_schema, check_words, conf_dir, help_text, register
from dualpace.settings.schema import SystemConfig
from dualpace.settings.wording import sentence, unknown_option
from dualpace.version import version

log = logging.getLogger(__name__)
register()

# Keys of files that are written anew.
_FILES = (
    "result",
    "bench.records",
    "bench.server_log",
    "runtime.round_log",
    "runtime.request_log",
)


def run(name: str, body: Callable[[Any], None]) -> None:
    """Calls `body(config)` with the settings of conf/NAME.yaml and the command line. What a person
    can mend leaves as one sentence and exit status 1, Ctrl-C as one log line; a reader of stdout
    that has enough, as `head`, as nothing."""
    try:
        try:
            _command(name, body)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _end_without_reader()


def _end_without_reader() -> NoReturn:
    """Handles a BrokenPipeError; raises it again if it is another pipe's."""
    if not _reader_is_gone():
        raise
    raise SystemExit(128 + signal.SIGPIPE) from None


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads; if so, what is left in it is dropped."""
    state = select.poll()
    state.register(sys.stdout.fileno(), select.POLLOUT)
    gone = any(event & select.POLLERR for _, event in state.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _command(name: str, body: Callable[[Any], None]) -> None:
    composing = True
    written: dict[str, int] = {}  # files, by the points of a sweep
    failed: list[str] = []  # points of a sweep

    def task(node: DictConfig) -> None:
        nonlocal composing
        composing = False
        of_hydra = HydraConfig.get()
        number = of_hydra.job.num if of_hydra.mode is RunMode.MULTIRUN else 0
        try:
            config = as_schema(node)
            if isinstance(config, SystemConfig):
                check(config)
            files = _files(node, written)
            body(config)
            written.update(dict.fromkeys(files, number))
        except ConfigError as error:
            if of_hydra.mode is not RunMode.MULTIRUN:
                sys.exit(str(error))
            log.error("point %d: %s", number, error)  # the others still run
            failed.append(str(number))
        except BrokenPipeError:  # Hydra would say that the job has failed
            _end_without_reader()
        except KeyboardInterrupt:
            log.info("interrupted")
            raise SystemExit(130) from None

    os.environ["HYDRA_FULL_ERROR"] = "1"  # it raises what it would otherwise print at length
    try:
        if {"--help", "-h"} & set(sys.argv):
            print(help_text(name, sys.argv[1:]))
            return
        if "--version" in sys.argv:
            print(f"DualPace {version()}")
            return
        _, unknown = get_args_parser().parse_known_args()
        if unknown:
            sys.exit(unknown_option(name, unknown[0], sys.argv[1:]))
        check_words(sys.argv[1:], name)
        hydra.main(version_base="1.3", config_path=conf_dir(), config_name=name)(task)()
        if failed:
            sys.exit(
                f"Points of the sweep that failed, for the reasons above: {', '.join(failed)}."
            )
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(sentence(error))
    except (YAMLError, ValueError) as error:
        if not composing:  # by then a ValueError is a fault of ours
            raise
        sys.exit(str(error) if isinstance(error, ConfigError) else sentence(error))


def _files(node: DictConfig, written: Mapping[str, int]) -> list[str]:
    """`key=name` of the files that a point of a sweep writes. Raises ConfigError where one is
    `written` already, by the point of that number."""
    named = {key: OmegaConf.select(node, key) for key in _FILES}
    files = [f"{key}={name}" for key, name in named.items() if name is not None]
    for file in files:
        if file in written:
            raise ConfigError(
                f"{file} has been written by point {written[file]} of the sweep: put "
                f"${{hydra:job.num}} into its name, within single quotes."
            )
    return files
