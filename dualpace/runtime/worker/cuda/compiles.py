"""Counts what Triton compiles, so that a round which had to wait for a compiler is seen."""

from typing import Any

import triton


class Compiles:
    """`after_ready` must stay 0."""

    def __init__(self) -> None:
        self._count = self._at_ready = 0
        triton.knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, *_: Any, already_compiled: bool = False, **__: Any) -> None:
        self._count += not already_compiled

    def ready(self) -> None:
        self._at_ready = self._count

    @property
    def after_ready(self) -> int:
        return self._count - self._at_ready
