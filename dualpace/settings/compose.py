"""From conf/*.yaml and overrides to a root schema, through Hydra's store. No torch."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dualpace.errors import ConfigError
from dualpace.settings.check import check
from dualpace.settings.help import APPENDED, APPENDED_OF, register_resolvers
from dualpace.settings.schema import ROOTS, VARIANTS, SystemConfig
from dualpace.settings.wording import sentence
from dualpace.settings.words import check_choices, own_folders


@functools.cache
def register() -> None:
    """Stores every schema and what help texts are made with, once."""
    register_resolvers()
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


def check_words(words: Sequence[str], root: str) -> None:
    """ConfigError for what Hydra would pass over, or fail at without a file's name."""
    for word in words:
        group = word.removeprefix("+").partition("=")[0]
        if word[0:1] == "+" and group in APPENDED and group not in APPENDED_OF.get(root, ()):
            takers = ", ".join(name for name, groups in APPENDED_OF.items() if group in groups)
            raise ConfigError(f"{word}: {root} has no {group}; it is for {takers}.")
        if word[0:1] == "~":
            raise ConfigError(
                f"{word}: no setting can be taken away; give it another value, or leave it alone."
            )
    check_choices(words, [Path(conf_dir()), *own_folders(words)])


def load(*overrides: str, root: str = "serve") -> Any:
    """What `scripts/ROOT.py` would run with for the same overrides, checked: an instance of the
    root's schema. ConfigError for an override that does not fit."""
    register()
    check_words(overrides, root)
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        try:
            node = compose(root, list(overrides))
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            raise ConfigError(sentence(error)) from error
        config = as_schema(node)
    assert isinstance(config, SystemConfig)
    check(config)
    return config


def help_text(root: str, words: Sequence[str]) -> str:
    """What `--help` prints beside `words`, the other arguments. Hydra's own takes seconds to list
    all groups that it knows."""
    overrides = [word for word in words if not word.startswith("-") and "=" in word]
    for folder in own_folders(words):
        overrides.append(f"hydra.searchpath=['file://{folder}']")
    check_words(words, root)
    register()
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        text: str = compose(root, overrides, return_hydra_config=True).hydra.help.template
    return text


def as_schema(node: DictConfig) -> Any:
    """`node` as the dataclasses that it was composed of. ConfigError for keys that they lack."""
    try:
        return OmegaConf.to_object(node)
    except AttributeError as error:  # added with a +, and schemas have slots
        found = re.search(r"'(\w+)' object has no attribute '(\w+)'", str(error))
        if found is None or not found.group(1).endswith("Config"):
            raise
        key = ".".join(_place(node, *found.groups())) or found.group(2)
        raise ConfigError(
            f"{key} is no setting: a + adds only hw and experiment; --help lists all settings."
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from error


def _place(node: DictConfig, schema: str, key: str) -> list[str]:
    """The names down to `key`, which was added to a part of `node` that is a `schema`; empty if
    there is none."""
    if key in node and getattr(OmegaConf.get_type(node), "__name__", "") == schema:
        return [key]
    for name in node:
        part = node._get_node(name)
        if isinstance(part, DictConfig) and (found := _place(part, schema, key)):
            return [str(name), *found]
    return []
