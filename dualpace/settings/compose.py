"""From conf/*.yaml and overrides to a root schema, through Hydra's store. No torch."""

import functools
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dualpace.errors import ConfigError
from dualpace.settings.check import check
from dualpace.settings.schema import ROOTS, VARIANTS, SystemConfig


@functools.cache
def register() -> None:
    """Stores every schema, once."""
    store = ConfigStore.instance()
    for name, schema in ROOTS.items():
        store.store(name=name, node=schema)
    for (group, name), schema in VARIANTS.items():
        store.store(group=group, name=name, node=schema)


def conf_dir() -> str:
    """The folder of YAML files: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "serve.yaml").is_file():
            return str(folder)
    raise FileNotFoundError(f"conf/ not found in or beside {package}")


def load(*overrides: str, root: str = "serve") -> Any:
    """What `scripts/ROOT.py` would run with for the same overrides, checked: an instance of the
    root's schema. ConfigError for an override that does not fit."""
    register()
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        try:
            config = OmegaConf.to_object(compose(root, list(overrides)))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(str(error)) from error
    assert isinstance(config, SystemConfig)
    check(config)
    return config
