"""Errors that a person can fix."""

from pathlib import Path


class ConfigError(ValueError):
    """A setting or input that cannot work, in one sentence: key, value, limit and remedy."""


def unreadable(path: Path, error: OSError) -> ConfigError:
    """What to raise for a file that is there and cannot be read."""
    return ConfigError(f"{path} cannot be read ({error.strerror}): let this user read it")
