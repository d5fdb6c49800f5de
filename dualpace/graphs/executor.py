"""Stages: the object that a worker calls, one a device.

It finds the executables of a batch by its row count, pads where a worker has not done so, and
knows whether anything was compiled after ready. What a call does besides the kernels takes a few
microseconds, for there are two a layer: nothing here enters a context or searches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualpace.graphs.compiles import num_compiles
from dualpace.graphs.sampling import Drawn, SamplingRows, draw, sample
from dualpace.graphs.table import Piece, StageTable


class Stages:
    """Shapes as in stages.py: T rows, H hidden, N and K heads, D head size, B rows to sample."""

    def __init__(self, tables: dict[str, StageTable]) -> None:
        self._tables = tables
        # Better tables, from a thread that prepares them. Appending to a deque is atomic.
        self._better: deque[tuple[str, StageTable]] = deque()
        self._compiles_at_ready = 0
        self._positions = (torch.empty(0), torch.empty(0))  # the last ones, and padded

    def ready(self) -> None:
        """From now on every compilation counts as one that a round had to wait for."""
        self._compiles_at_ready = num_compiles()

    @property
    def compiles_after_ready(self) -> int:
        """Compilations since `ready`; anything but 0 is a defect."""
        return num_compiles() - self._compiles_at_ready

    def offer(self, stage: str, table: StageTable) -> None:
        """Have `table` serve the stage from the next round on. From any thread."""
        self._better.append((stage, table))

    def begin_round(self) -> None:
        """Take up what has been offered: between rounds, so that one runs on the same tables."""
        while self._better:
            stage, table = self._better.popleft()
            self._tables[stage] = table
            self._positions = (torch.empty(0), torch.empty(0))

    def bucket(self, num_rows: int) -> int:
        """Rows that the layers compute for a batch of `num_rows`; itself where it runs as it is."""
        return self._tables["post_attention"].padded(num_rows)

    def tables(self) -> dict[str, StageTable]:
        """What serves each stage now."""
        return dict(self._tables)

    def pre_layer(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]."""
        out: Tensor = self._run("pre_layer", 0, token_ids)
        return out

    def pre_attention(
        self, layer: int, x: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H], positions int64 [T] -> q [T, N, D], k [T, K, D], v [T, K, D]."""
        out: tuple[Tensor, Tensor, Tensor]
        out = self._run("pre_attention", layer, x, self._padded(positions))
        return out

    def _padded(self, positions: Tensor) -> Tensor:
        """As many positions as rows will be computed, padded once for all layers of a batch."""
        given, padded = self._positions
        if given is not positions:
            count = positions.shape[0]
            pieces = self._tables["pre_attention"].pieces(count)
            padded = positions
            if len(pieces) == 1 and pieces[0][1] != count:
                padded = _pad(positions, pieces[0][1])
            self._positions = positions, padded
        return padded

    def post_attention(self, layer: int, attn: Tensor, x: Tensor) -> Tensor:
        """attn [T, N * D], x [T, H] -> x of the next layer [T, H]."""
        out: Tensor = self._run("post_attention", layer, attn, x)
        return out

    def logits(self, x: Tensor) -> Tensor:
        """x [B, H] -> float32 [B, V]."""
        out: Tensor = self._run("logits", 0, x)
        return out

    def post_layer(self, x: Tensor, rows: SamplingRows) -> Tensor:
        """x [B, H] and as many sampling rows -> token ids int32 [B]."""
        if rows.best_is_enough:
            out: Tensor = self._run("post_layer_greedy", 0, x)
            return out
        return sample(self._run("logits", 0, x), rows)

    def draw(self, x: Tensor, rows: SamplingRows) -> Drawn:
        """`post_layer`, with the log-probabilities that rows ask for."""
        if rows.logprobs is None:
            return Drawn(self.post_layer(x, rows))
        return draw(self.logits(x), rows)

    def _run(self, stage: str, layer: int, *rows: Tensor) -> Any:
        count = rows[0].shape[0]
        pieces = self._tables[stage].pieces(count)
        if len(pieces) == 1:
            return _run_piece(pieces[0], layer, rows)
        sizes = [piece[0] for piece in pieces]
        parts = zip(*[r.split_with_sizes(sizes) for r in rows], strict=True)
        return _join([_run_piece(p, layer, part) for p, part in zip(pieces, parts, strict=True)])


def _run_piece(piece: Piece, layer: int, rows: Sequence[Tensor]) -> Any:
    count, computed, entry = piece
    if count == computed:
        return entry.graph(*rows, *entry.weights[layer])
    padded = [r if r.shape[0] == computed else _pad(r, computed) for r in rows]
    return _cut(entry.graph(*padded, *entry.weights[layer]), count)


def _pad(rows: Tensor, bucket: int) -> Tensor:
    """`rows` and others up to `bucket`, whose results nobody looks at.

    Activations, [T, W], are often cut from a padded tensor, whose other rows are then still behind
    them.
    """
    if rows.is_floating_point():
        try:
            return rows.as_strided((bucket, rows.shape[1]), rows.stride())
        except RuntimeError:
            pass  # nothing is behind them
    padded = rows.new_zeros(bucket, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded


def _cut(out: Any, count: int) -> Any:
    if isinstance(out, tuple):
        return tuple([o[:count] for o in out])
    return out[:count]


def _join(outs: list[Any]) -> Any:
    if isinstance(outs[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*outs, strict=True))
    return torch.cat(outs)
