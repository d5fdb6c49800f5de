"""Errors that a person can fix."""


class ConfigError(ValueError):
    """A setting or input that cannot work, in one sentence: key, value, limit and remedy."""
