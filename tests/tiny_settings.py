"""Settings of a tiny model for tests that need many: composed once, then changed key by key."""

import copy
import functools

import yaml

from dualpace.settings.compose import load
from dualpace.settings.schema import VARIANTS, ServeConfig


def settings(*overrides: str) -> ServeConfig:
    """serve.yaml with a tiny random model and `key=value` changes; of the group choices only
    `policy=NAME`, others need `load`.
    """
    config = copy.deepcopy(_composed())
    for override in overrides:
        key, value = override.split("=", 1)
        *groups, name = key.split(".")
        node = functools.reduce(getattr, groups, config)
        assert hasattr(node, name), key
        choice = VARIANTS.get(("policy", f"{value}_schema")) if key == "policy" else None
        setattr(node, name, choice() if choice else yaml.safe_load(value))
    return config


@functools.cache
def _composed() -> ServeConfig:
    config = load("model=tiny_random")
    assert isinstance(config, ServeConfig)
    return config
