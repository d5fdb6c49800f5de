"""A command's run: Hydra at the edge, one ConfigError sentence instead of a traceback. Knows
nothing about what the commands do.
"""

import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
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

    def task(node: DictConfig) -> None:
        nonlocal composing
        composing = False
        try:
            config = as_schema(node)
            if isinstance(config, SystemConfig):
                check(config)
            body(config)
        except ConfigError as error:
            if HydraConfig.get().mode is RunMode.MULTIRUN:  # the sweep's other points still run
                raise CompactHydraException(str(error)) from None
            sys.exit(str(error))
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
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(sentence(error))
    except (YAMLError, ValueError) as error:
        if not composing:  # by then a ValueError is a fault of ours
            raise
        sys.exit(str(error) if isinstance(error, ConfigError) else sentence(error))
