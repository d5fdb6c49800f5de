"""The two parts of `--help` that Hydra would fill with too much or too little: this tool's groups
and choices, and each setting with its value and meaning. conf/hydra/help/ calls them by name.
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from dualpace.settings.meaning import meanings, summary

_WIDTH = 100
_VALUE_WIDTH = 38  # of `key: value`, before its meaning


# Groups that are in no defaults list, so chosen with a + in front, by the commands that have them.
APPENDED_OF = {
    "serve": ("hw",),
    "doctor": ("hw",),
    "profile_hw": ("hw",),
    "bench": ("hw", "experiment"),
}
APPENDED = frozenset(group for groups in APPENDED_OF.values() for group in groups)


def register_resolvers() -> None:
    """`${help_groups:}` and `${help_keys:}`."""
    OmegaConf.register_new_resolver("help_groups", _groups, replace=True)
    OmegaConf.register_new_resolver("help_keys", _keys, replace=True)


def _groups(_root_: DictConfig) -> str:
    runtime, more = _root_.hydra.runtime, APPENDED_OF.get(_root_.hydra.help.app_name, ())
    choices = reversed([str(group) for group in runtime.choices])
    used = [group for group in choices if not group.startswith("hydra/")]
    folders = [Path(s.path) for s in runtime.config_sources if s.schema == "file"]
    lines = []
    for group in dict.fromkeys([*used, *more]):
        files = {file.stem for folder in folders for file in (folder / group).glob("*.yaml")}
        prefix = "+" if group in more else ""
        lines.append(_wrapped(f"{prefix}{group}: ", ", ".join(sorted(files))))
    if not lines:
        return ""
    head = "\n== Groups (group=choice, those with a + as +group=choice) =="
    return "\n".join([head, *lines, ""])


def _keys(_root_: DictConfig) -> str:
    keys = [key for key in _root_ if key != "hydra"]
    return "\n".join(line for key in keys for line in _setting(_root_, str(key), 0))


def _setting(parent: DictConfig, key: str, depth: int) -> Iterator[str]:
    """Lines of one setting, or of a group and all in it."""
    indent = "  " * depth
    node = parent._get_node(key)
    if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
        schema = OmegaConf.get_type(node)
        text = summary(schema) if schema not in (dict, None) else ""
        yield _wrapped(f"{indent}{key}:", text)
        for name in node:
            yield from _setting(node, str(name), depth + 1)
        return
    schema = OmegaConf.get_type(parent)
    known = {} if schema in (dict, None) else meanings(schema)
    yield _wrapped(f"{indent}{key}: {shown(parent[key])}", known[key].text if key in known else "")


def shown(value: Any) -> str:
    """A setting's value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | ListConfig):
        return f"[{', '.join(shown(item) for item in value)}]"
    return str(value)


def _wrapped(head: str, text: str) -> str:
    """`head` and `text` in two columns, or one after the other for a group's line."""
    if not text:
        return head
    column = " " * (0 if head.endswith(": ") else _VALUE_WIDTH)
    first = head if not column else f"{head:{_VALUE_WIDTH - 1}} "
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=column or "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
