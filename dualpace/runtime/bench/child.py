"""First lines of a server that the benchmark starts: it dies with the benchmark, on cores that the
client does not use.

`python -m dualpace.runtime.bench.child PARENT CORES serve` reads the settings of our own server as
YAML from stdin; `... exec COMMAND...` becomes a peer's.
"""

import logging
import os
import sys
from typing import IO, Any

from omegaconf import OmegaConf

from dualpace.errors import ConfigError
from dualpace.runtime.process import become_child
from dualpace.settings.schema import VARIANTS, ServeConfig


def settings(file: IO[str]) -> ServeConfig:
    """What `OmegaConf.to_yaml` wrote of a ServeConfig; the policy's name says its schema."""
    values: Any = OmegaConf.load(file)
    schema = ServeConfig(policy=VARIANTS["policy", f"{values.policy.name}_schema"]())
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    assert isinstance(config, ServeConfig)
    return config


def serve() -> None:
    from dualpace.runtime.server import serve as run_server
    from dualpace.settings.resolve import resolve

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )
    try:
        run_server(resolve(settings(sys.stdin)))
    except ConfigError as error:
        sys.exit(str(error))


def main() -> None:
    parent, cores, action, *command = sys.argv[1:]
    become_child(int(parent), ignore_signals=False)
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if action == "serve":
        serve()
    else:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
