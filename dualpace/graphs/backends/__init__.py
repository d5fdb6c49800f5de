"""Backends: how a stage becomes an executable. Name -> "module:attribute", imported when chosen."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from dualpace.errors import ConfigError

if TYPE_CHECKING:
    from dualpace.graphs.store import GraphStore

Stage = Callable[..., Any]
Arguments = tuple[Tensor | None, ...]
Pack = Callable[[Tensor, Tensor | None], Tensor]  # (weight, bias) -> handle


class Whole(Protocol):
    """A layout that has all weights of a stage behind one handle."""

    def takes(self, stage: Stage, arguments: Arguments) -> bool:
        """Whether it has the stage, with weights of these shapes."""

    def pack(self, stage: Stage, arguments: Arguments) -> Tensor:
        """A handle of the weights of one layer."""


BACKENDS = {
    "eager": "dualpace.graphs.backends.eager:Eager",
    "packed": "dualpace.graphs.backends.eager:Packed",
    "inductor": "dualpace.graphs.backends.inductor:Inductor",
    "inductor-packed": "dualpace.graphs.backends.inductor:InductorPacked",
    "rows": "dualpace.graphs.backends.few_rows:Rows",
    "inductor-rows": "dualpace.graphs.backends.few_rows:InductorRows",
    "amx": "dualpace.graphs.backends.tiles:Amx",
    "inductor-amx": "dualpace.graphs.backends.tiles:InductorAmx",
    "avx512-bf16": "dualpace.graphs.backends.tiles:Avx512Bf16",
    "inductor-avx512-bf16": "dualpace.graphs.backends.tiles:InductorAvx512Bf16",
    "ipex": "dualpace.graphs.backends.ipex:Ipex",
}


class Backend(Protocol):
    """Makes executables of stage functions.

    `form` names the layout of weights that its executables take: backends of one form share them.
    """

    name: str
    static: bool  # builds an executable for each bucket, not one for all row counts
    compiled: bool  # building takes a compiler, so it is done ahead and kept on disk
    form: str

    @property
    def pack(self) -> Pack | None:
        """Makes the handle of a matrix; None where matrices are taken as they are."""

    @property
    def whole(self) -> Whole | None:
        """Packs the stages that its executables take behind one handle, if there are any."""

    def check(self, dtype: str) -> None:
        """ConfigError if it cannot run weights of this dtype ("bf16" or "float32") here."""

    def build(self, stage: Stage, example: Arguments, store: GraphStore | None = None) -> Stage:
        """An executable for arguments of the shapes and dtypes of `example`, kept in `store`."""

    def pads(self, device: str) -> bool:
        """Whether an executable takes its bucket's row count alone: fewer rows are padded to it."""

    def code_rows(self, bucket: int, threads: int) -> int:
        """The row count that `bucket`'s code is written for: buckets of one share their code."""

    def ensure(self, stage: Stage, example: Arguments, store: GraphStore) -> bool:
        """Have the graph of `build` in `store`, which runs nothing: whether it is there now.
        False where another process is at it.
        """


def backend_of(name: str) -> Backend:
    """A new instance of the named backend; ConfigError for an unknown name."""
    if name not in BACKENDS:
        raise ConfigError(f"compile.backend={name} is unknown; give one of {', '.join(BACKENDS)}")
    module, attribute = BACKENDS[name].split(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend
