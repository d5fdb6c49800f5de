"""Which kernel multiplies: the library's product or a skinny one, per product and row count.

A `Choices` table is measured once on a device (tune.py) and kept on disk. An empty one takes the
library everywhere, which is also what float32 gets. Products: qkv, o, gate_up, down, head.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dualpace.graphs.gpu.skinny import MAX_ROWS, Skinny, block_rows

PRODUCTS = ("qkv", "o", "gate_up", "down", "head")
_SHARED_BYTES = 200_000  # of one program; a Hopper block may have 227 KiB
_SPLITS = (1, 2, 4, 7, 8, 14, 16)
_PIPELINES = ((64, 6), (128, 4), (256, 3))  # (block_k, stages)


@dataclass(slots=True)
class Choices:
    """(product, bucket) -> how it is cut; None or nothing takes the library. Times in ms."""

    table: dict[tuple[str, int], Skinny | None] = field(default_factory=dict)
    times: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)

    def of(self, product: str, rows: int) -> Skinny | None:
        return self.table.get((product, rows))

    def save(self, path: Path, key: str) -> None:
        """Published whole: a reader sees the old file or the new one."""
        rows = [
            {"product": p, "rows": r, "how": how and asdict(how), "times": self.times.get((p, r))}
            for (p, r), how in self.table.items()
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"key": key, "choices": rows}, file, indent=1)
        os.replace(file.name, path)

    @classmethod
    def load(cls, path: Path, key: str) -> Choices | None:
        """None where there is none, or where it was measured for something else or is damaged."""
        try:
            stored = json.loads(path.read_text())
            if stored["key"] != key:
                return None
            result = cls()
            for row in stored["choices"]:
                place = (row["product"], row["rows"])
                result.table[place] = row["how"] and Skinny(**row["how"])
                result.times[place] = row["times"] or {}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return result


def candidates(
    product: str, columns: int, depth: int, rows: int, sms: int
) -> Iterator[Skinny | None]:
    """None (the library), then the cuts worth timing. `columns` are those of one output."""
    yield None
    if rows > MAX_ROWS:
        return
    weights = 2 if product == "gate_up" else 1  # tiles of the weight in flight at a time
    sizes = {"gate_up": (16, 32, 64), "head": (64, 128)}.get(product, (32, 64, 128))
    for block_n in sizes:
        for block_k, stages in _PIPELINES:
            tile = (block_n * weights + block_rows(rows)) * block_k * 2
            if tile * stages > _SHARED_BYTES:
                continue
            warps = 8 if block_n * weights >= 128 else 4
            splits = (1,) if product in ("gate_up", "head") else _splits(columns // block_n, sms)
            for split in splits:
                how = Skinny(block_n, block_k, stages, warps, split)
                if how.fits(columns, depth):
                    yield how


def _splits(tiles: int, sms: int) -> list[int]:
    """The splits whose programs come nearest to two and to four on every multiprocessor."""
    wanted = [min(_SPLITS, key=lambda s: abs(tiles * s - sms * n)) for n in (2, 4)]
    return sorted(set(wanted))


class Workspace:
    """Room that every product shares: they run one after another on one stream."""

    def __init__(self, device: torch.device, dtype: torch.dtype, plain: int, partial: int) -> None:
        self._plain = torch.empty(plain, dtype=dtype, device=device)
        self._partial = torch.empty(partial, dtype=torch.float32, device=device)

    def plain(self, *shape: int) -> Tensor:
        return _view(self._plain, shape)

    def partial(self, *shape: int) -> Tensor:
        return _view(self._partial, shape)


def _view(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    assert count <= flat.numel(), f"workspace of {flat.numel()} elements, {shape} wanted"
    return flat[:count].view(shape)
