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

from dualpace.graphs.gpu.skinny import MAX_ROWS, MAX_SPLIT, Skinny, block_rows

PRODUCTS = ("qkv", "o", "gate_up", "down", "head")
_SHARED_BYTES = 227 << 10  # of one multiprocessor; a program's own overhead is 1 KiB
_THREADS = 2048  # of one multiprocessor
_REGISTERS = 65536 // 110  # threads of one multiprocessor at the registers that a tile takes
# (block_k, stages): few rows leave the pipeline to the weight, many share it with x.
_PIPELINES = {16: ((64, 6), (128, 4), (256, 3)), 64: ((64, 4), (64, 6), (128, 3), (256, 2))}
# Columns of a tile: with many rows a narrow one would read x as often as the weight.
_SIZES = {
    16: {"gate_up": (32, 64), "head": (64, 128)},
    64: {"gate_up": (64, 128), "head": (64, 128)},
}
_PARTIAL_SIZES = {16: (32, 64), 64: (64, 128, 256)}


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
    tiles_at_once = 2 if product == "gate_up" else 1  # tiles of the weight in flight
    height = block_rows(rows)
    many = 64 if height == 64 else 16
    for block_n in _SIZES[many].get(product, _PARTIAL_SIZES[many]):
        for block_k, stages in _PIPELINES[many]:
            shared = (block_n * tiles_at_once + height) * block_k * 2 * stages + 1024
            warps = 8 if block_n * tiles_at_once >= 128 else 4
            at_once = min(
                _SHARED_BYTES // shared, _THREADS // warps // 32, _REGISTERS // warps // 32
            )
            if not at_once:
                continue
            slots = at_once * sms
            splits, widths = [1], [block_n]
            if product == "gate_up":
                widths = sorted({block_n, _width(columns, block_n, slots)})
            elif product != "head":
                splits = _splits(columns // block_n, slots, sms)
            for split in splits:
                for width in widths:
                    narrower = width if width < block_n else 0
                    how = Skinny(block_n, block_k, stages, warps, split, narrower)
                    if how.fits(columns, depth):
                        yield how


def _splits(tiles: int, slots: int, sms: int) -> list[int]:
    """Splits that fill all slots once or twice, or two or four programs a multiprocessor."""
    wanted = {slots // tiles, 2 * slots // tiles, round(2 * sms / tiles), round(4 * sms / tiles)}
    return sorted(split for split in wanted if 1 <= split <= MAX_SPLIT)


def _width(columns: int, block_n: int, slots: int) -> int:
    """The width of at least 3/4 block_n whose programs leave the fewest slots of a wave empty."""

    def used(width: int) -> float:
        programs = columns // width
        return programs / (-(-programs // slots) * slots)

    widths = [w for w in range(block_n, block_n * 3 // 4, -4) if columns % w == 0]
    return max(widths, key=used, default=block_n)


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
