"""A plan for servers whose engine is a fake: what the front reads is given, the rest is filler."""

import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any

from byte_tokenizer import EOS, VOCAB

from dualpace.runtime.plan import Plan


def small_plan(source: str = "fake", port: int = 0, drain_timeout_s: float = 5.0) -> Plan:
    """`source` is the fake engine's script: see `fake_engine`."""
    return _filled(
        Plan,
        {
            "model": {
                "source": source,
                "name": "tiny",
                "max_context": 4096,
                "vocab": VOCAB,
                "eos_token_ids": (EOS,),
            },
            "kv": {"gpu_blocks": 100, "host_blocks": 200},
            "server": {"host": "127.0.0.1", "port": port, "drain_timeout_s": drain_timeout_s},
        },
    )


def _filled(kind: Any, values: dict[str, Any]) -> Any:
    """A `kind` with `values`, its other fields 1, empty or None by their type."""
    hints = typing.get_type_hints(kind)
    return kind(**{f.name: _value(hints[f.name], values.get(f.name)) for f in fields(kind)})


def _value(kind: Any, given: Any) -> Any:
    if is_dataclass(kind):
        return _filled(kind, given or {})
    if given is not None:
        return given
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return None
    return () if typing.get_origin(kind) is tuple else kind(1)
