"""Settings that a program has as values, in the words of a command line."""

import re
from collections.abc import Mapping
from typing import Any


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """`settings` in Hydra's grammar; a dict stands for the settings of a group."""
    found = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found += as_overrides({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            found.append(override(key, value))
    return found


def override(key: str, value: Any) -> str:
    """`key=value` in Hydra's grammar, strings quoted where they need it."""
    if value is None:
        return f"{key}=null"
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    if isinstance(value, list | tuple):
        return f"{key}=[{','.join(override('', item)[1:] for item in value)}]"
    text = str(value)
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w./-]*|/[\w./-]+", text):
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        return f"{key}='{escaped}'"
    return f"{key}={text}"
