"""Objects behind 0-d int64 tensors, which graphs take for weights.

What a handle means is private to a process; an object lives as long as its handle. This file knows
nothing about the objects.
"""

import itertools
import weakref
from typing import Generic, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class Handles(Generic[_T]):
    """One kind of object by its handles."""

    def __init__(self) -> None:
        self._objects: dict[int, _T] = {}
        self._numbers = itertools.count(1)

    def add(self, item: _T) -> Tensor:
        """A handle (0-d int64) for the object."""
        number = next(self._numbers)
        self._objects[number] = item
        handle = torch.tensor(number, dtype=torch.int64)
        weakref.finalize(handle, self._objects.pop, number).atexit = False
        return handle

    def __getitem__(self, handle: Tensor) -> _T:
        """KeyError where the handle's object is gone."""
        return self._objects[int(handle.item())]

    def __len__(self) -> int:
        return len(self._objects)
