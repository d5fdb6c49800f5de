"""Backends: how a stage becomes an executable. Name -> "module:attribute", imported when chosen."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from dualpace.errors import ConfigError
from dualpace.graphs.weights import Weights

if TYPE_CHECKING:
    from dualpace.graphs.store import GraphStore

Stage = Callable[..., Any]

BACKENDS = {
    "eager": "dualpace.graphs.backends.eager:Eager",
    "inductor": "dualpace.graphs.backends.inductor:Inductor",
    "inductor-packed": "dualpace.graphs.backends.inductor:InductorPacked",
}


class Backend(Protocol):
    """Makes executables of stage functions. One instance serves one device of one process."""

    name: str
    static: bool  # its executables take only the row count that they were built for

    def prepare(self, weights: Weights) -> Weights:
        """The weights as its executables want them (packed and replaced by handles, or as is)."""

    def build(
        self, stage: Stage, example: tuple[Tensor | None, ...], store: GraphStore | None = None
    ) -> Stage:
        """An executable for arguments of the shapes and dtypes of `example`, kept in `store`."""

    def num_compiles(self) -> int:
        """Compilations in this process so far, those that nobody asked for included."""


def backend_of(name: str) -> Backend:
    """A new instance of the named backend; ConfigError for an unknown name."""
    if name not in BACKENDS:
        raise ConfigError(f"compile.backend={name} is unknown; give one of {', '.join(BACKENDS)}")
    module, attribute = BACKENDS[name].split(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend
