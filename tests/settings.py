"""Settings for tests that need many: composed once, then changed key by key."""

import copy
import functools

import yaml

from dualpace.settings.compose import load
from dualpace.settings.schema import ServeConfig


def settings(*overrides: str) -> ServeConfig:
    """serve.yaml with a tiny random model and `key=value` changes; group choices need `load`."""
    config = copy.deepcopy(_composed())
    for override in overrides:
        key, value = override.split("=", 1)
        *groups, name = key.split(".")
        node = functools.reduce(getattr, groups, config)
        assert hasattr(node, name), key
        setattr(node, name, yaml.safe_load(value))
    return config


@functools.cache
def _composed() -> ServeConfig:
    config = load("model=tiny_random")
    assert isinstance(config, ServeConfig)
    return config
