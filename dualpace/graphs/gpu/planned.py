"""Small host arrays on their way to fixed device buffers, once a round, without a wait.

One pinned copy and one transfer a round. Two host buffers take turns, each guarded by an event, so
that the next round may be prepared while a transfer of this one has not run yet.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16
_TURNS = 2


class PackedInputs:
    """Named 1-d arrays in one device buffer. Addresses never change, so graphs may read them."""

    def __init__(self, sizes: Mapping[str, tuple[torch.dtype, int]], device: torch.device) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, count) in sizes.items():
            num_bytes = count * dtype.itemsize
            self._places[name] = (end, num_bytes)
            end += -(-num_bytes // _ALIGN) * _ALIGN
        pinned = device.type == "cuda"
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._host = [torch.zeros(end, dtype=torch.uint8, pin_memory=pinned) for _ in range(_TURNS)]
        self._events = [torch.cuda.Event() for _ in range(_TURNS)] if pinned else []
        self._turn = 0
        self.views: dict[str, Tensor] = {}
        self._arrays: list[dict[str, np.ndarray]] = [{} for _ in range(_TURNS)]
        for name, (dtype, _) in sizes.items():
            start, num_bytes = self._places[name]
            part = slice(start, start + num_bytes)
            self.views[name] = self._device[part].view(dtype)
            for host, arrays in zip(self._host, self._arrays, strict=True):
                arrays[name] = host[part].view(dtype).numpy()

    def send(
        self,
        values: Mapping[str, np.ndarray],
        length: str | None = None,
        idle: Mapping[str, float] | None = None,
    ) -> int:
        """Copies `values` to the starts of their buffers, on the current stream; returns the turn.

        `length` names the last array, of which only what was given travels. The rest of an array
        is filled with what `idle` has for it, or 0, where `idle` is given.
        """
        turn = self._turn = (self._turn + 1) % _TURNS
        if self._events:
            self._events[turn].synchronize()  # two rounds ago: nearly never waits
        for name, value in values.items():
            array = self._arrays[turn][name]
            array[: len(value)] = value
            if idle is not None:
                array[len(value) :] = idle.get(name, 0)
        end = self._host[turn].numel()
        if length is not None:
            start, num_bytes = self._places[length]
            end = start + len(values[length]) * (num_bytes // len(self._arrays[turn][length]))
        self._device[:end].copy_(self._host[turn][:end], non_blocking=True)
        return turn

    def sent(self) -> None:
        """All that reads this turn's host memory has been issued on the current stream."""
        if self._events:
            self._events[self._turn].record()
