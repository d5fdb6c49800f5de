"""Stages over float32 matrices that stay as they are, whose few-row products are our own."""

from __future__ import annotations

from torch import Tensor

from dualpace.errors import ConfigError
from dualpace.graphs.backends import Pack
from dualpace.graphs.backends.eager import Eager
from dualpace.graphs.backends.inductor import Inductor


class _InRows:
    """Handles of plain matrices: no copy is made, and graphs are those of packed matrices."""

    name: str
    form = "rows"

    @property
    def pack(self) -> Pack | None:
        return _handle

    def check(self, dtype: str) -> None:
        """ConfigError for bf16, which the products do not take."""
        if dtype != "float32":
            raise ConfigError(
                f"compile.backend={self.name} multiplies float32 only: set model.dtype=float32, or "
                "another backend"
            )


def _handle(weight: Tensor, bias: Tensor | None) -> Tensor:
    from dualpace.cpu import few_rows, packed

    return packed.register(few_rows.RowsLinear(weight, bias))


class Rows(_InRows, Eager):
    """Nothing compiled by Inductor: what a start in float32 begins with."""

    name = "rows"


class InductorRows(_InRows, Inductor):
    name = "inductor-rows"
