"""Command-line entry points: Hydra at the edge, one ConfigError sentence instead of a traceback.

Heavy imports (torch, fastapi) wait inside the functions, so `--help` and `--cfg` stay instant.
"""

import logging
import shlex
import sys
from collections.abc import Callable
from typing import Any

import hydra
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf

from dualpace.errors import ConfigError
from dualpace.runtime.bench.config import PlotConfig
from dualpace.settings.check import check
from dualpace.settings.compose import conf_dir, register
from dualpace.settings.schema import (
    BenchConfig,
    ProfileHwConfig,
    ServeConfig,
    SimulateConfig,
    SystemConfig,
)

log = logging.getLogger(__name__)
register()


def checked(node: DictConfig) -> Any:
    """`node` as dataclasses of its root schema, checked."""
    config = OmegaConf.to_object(node)
    assert isinstance(config, SystemConfig)
    check(config)
    return config


def at_the_edge(node: DictConfig, body: Callable[[Any], None]) -> None:
    """Runs `body(config)`; a ConfigError leaves as one sentence, Ctrl-C as one log line."""
    try:
        body(checked(node))
    except ConfigError as error:
        raise CompactHydraException(str(error)) from None
    except KeyboardInterrupt:
        log.info("interrupted")
        raise SystemExit(130) from None


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="serve")
def serve(node: DictConfig) -> None:
    """Serves a model over HTTP until stopped."""
    at_the_edge(node, _serve)


def _serve(config: ServeConfig) -> None:
    from dualpace.settings.resolve import resolve

    plan = resolve(config)
    for line in plan.lines():
        log.info("plan %s", line)
    from dualpace.runtime.server import serve as run_server

    run_server(plan)


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="serve")
def doctor(node: DictConfig) -> None:
    """Reports on the machine; exit code 1 if the configuration cannot be served here."""
    at_the_edge(node, _doctor)


def _doctor(config: ServeConfig) -> None:
    from dualpace.doctor import run

    if not run(config):
        raise SystemExit(1)


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="simulate")
def simulate(node: DictConfig) -> None:
    """Plays a workload against a policy on a simulated machine."""
    at_the_edge(node, _simulate)


def _simulate(config: SimulateConfig) -> None:
    from dualpace.runtime.simulate.report import print_report
    from dualpace.runtime.simulate.run import simulate as run

    print_report(run(config))


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="bench")
def bench(node: DictConfig) -> None:
    """Puts a workload to a server and measures what its clients see."""
    at_the_edge(node, _bench)


def _bench(config: BenchConfig) -> None:
    from dualpace.runtime.bench.report import print_report

    try:
        from dualpace.runtime.bench.run import bench as run
    except ModuleNotFoundError as error:  # serving needs no HTTP client
        raise ConfigError(
            f"bench needs {error.name}: pip install 'dualpace[bench]' ({error})."
        ) from None

    for result in run(config, shlex.join(["python", *sys.argv])):
        print_report(result)


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="profile_hw")
def profile_hw(node: DictConfig) -> None:
    """Measures this machine and fits the settings that depend on it."""
    at_the_edge(node, _profile_hw)


def _profile_hw(config: ProfileHwConfig) -> None:
    from dualpace.runtime.profile.sweep import run

    run(config)


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="plot")
def plot(node: DictConfig) -> None:
    """Draws the paper's figures from result files."""
    from dualpace.runtime.bench.plot import plot as run

    try:
        config = OmegaConf.to_object(node)
        assert isinstance(config, PlotConfig)
        run(config)
    except ConfigError as error:
        raise CompactHydraException(str(error)) from None
