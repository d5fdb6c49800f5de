"""Errors that a person can fix."""


class ConfigError(ValueError):
    """A setting or input that cannot work: one sentence with the key, its value, the limit and a remedy."""
