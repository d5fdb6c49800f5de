"""Sums over GPUs of one host inside the kernel that uses them, for the few rows of a decode step.

A library's all-reduce is a kernel of its own and most of its time is waiting; for few rows it costs
more than the product before it. Here the kernel that adds a residual and norms (fused.add_norm)
also leaves its row where the other GPUs can read it, tells them, and reads theirs. Rows are
independent: a program waits for the same row of the other ranks and for nothing else.

Every rank has two sets of rows and flags, used in turns. A rank leaves row r of one set again only
when it has seen every other rank's flag of a later sum, in the other set; those ranks had then
ended the kernel that read it.

Shape suffixes: M rows, H hidden, S splits.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# Kernels are typed by Triton, at their launch.

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dualpace.graphs.collective import TorchCollective
from dualpace.graphs.gpu.device import launch_options

log = logging.getLogger(__name__)

# All programs of a launch must be on the device at once, since each waits for another GPU's.
MAX_ROWS = 256


class PeerSums:
    """The memory of one rank's sums, and where the others' is. One stream uses it."""

    def __init__(self, rank: int, rows: Sequence[Tensor], flags: Sequence[Tensor]) -> None:
        """rows: every rank's [2, M, H] in the model's dtype; flags: every rank's int32 [2, M,
        ranks], 0. Both mapped here, in the order of the ranks.
        """
        device = rows[rank].device
        self.rank, self.size = rank, len(rows)
        self.max_rows = rows[rank].shape[1]
        self._rows, self._flags = list(rows), list(flags)  # keeps them
        self._row_places, self._flag_places = (
            torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)
            for tensors in (rows, flags)
        )

    @classmethod
    def join(
        cls, collective: TorchCollective, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> PeerSums | None:
        """Together with the other ranks of an NCCL group; None on all of them where one cannot read
        another's memory.
        """
        shapes = ((2, MAX_ROWS, hidden), (2, MAX_ROWS, collective.size))
        mapped: list[list[Tensor]] = []
        try:
            for shape, kind in zip(shapes, (dtype, torch.int32), strict=True):
                mapped.append(_map(collective, shape, kind, device))
        except RuntimeError as error:
            log.warning("GPUs add up by NCCL alone, since one cannot read another's: %s", error)
        torch.cuda.synchronize(device)
        # Nobody's flags are raised before all have been lowered.
        is_mapped = torch.full((1,), float(len(mapped) == len(shapes)), device=device)
        if collective.all_reduce(is_mapped).item() < collective.size:
            return None
        return cls(collective.rank, *mapped)

    def add_norm(
        self, parts_SMH: Tensor, x_MH: Tensor, weight_H: Tensor, h_MH: Tensor, eps: float, turn: int
    ) -> None:
        """x += the sum of parts of all ranks, in place; h = norm(x). Each rank's sum is rounded to
        x's dtype, and all ranks add in the same order. `turn` is 0 and 1 by turns.
        """
        S, M, H = parts_SMH.shape
        assert self.max_rows >= M
        _add_norm_of_ranks[(M,)](
            parts_SMH,
            x_MH,
            weight_H,
            h_MH,
            self._row_places,
            self._flag_places,
            M,
            H,
            turn * self.max_rows,
            eps,
            SPLIT=S,
            RANK=self.rank,
            RANKS=self.size,
            BLOCK=triton.next_power_of_2(H),
            num_warps=8,
            **launch_options(x_MH.device),
        )


def _map(
    collective: TorchCollective, shape: tuple[int, ...], kind: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Zeros of this shape on every rank, all of them mapped here."""
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(*shape, dtype=kind, device=device)
    own.zero_()
    handle = symmetric.rendezvous(own, collective.group)
    return [
        own if rank == collective.rank else handle.get_buffer(rank, shape, kind)
        for rank in range(collective.size)
    ]


@triton.jit
def _add_norm_of_ranks(
    parts,
    x,
    weight,
    h,
    row_places,
    flag_places,
    M,
    H,
    first,
    eps,
    SPLIT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = c < H
    dtype: tl.constexpr = x.dtype.element_ty
    weights = tl.load(weight + c, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SPLIT):
        part = tl.load(parts + (s * M + row) * H + c, mask=inside, other=0.0)
        own += part.to(tl.float32)
    mine = own.to(dtype)
    place = (first + row) * H + c
    flag = (first + row) * RANKS
    target = tl.multiple_of(tl.load(row_places + RANK).to(tl.pointer_type(dtype)), 16)
    tl.store(target + place, mine, mask=inside)
    tl.debug_barrier()  # all of the row is stored before one thread tells
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = tl.load(flag_places + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + flag + RANK, 1, sem="release", scope="sys")
    here = tl.load(flag_places + RANK).to(tl.pointer_type(tl.int32))
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += mine.to(tl.float32)
        else:
            while tl.atomic_cas(here + flag + rank, 1, 0, sem="acquire", scope="sys") != 1:
                pass
            source = tl.multiple_of(tl.load(row_places + rank).to(tl.pointer_type(dtype)), 16)
            value = tl.load(source + place, mask=inside, other=0.0, volatile=True)
            total += value.to(tl.float32)
    residual = tl.load(x + row * H + c, mask=inside, other=0.0).to(tl.float32)
    rounded = (residual + total).to(dtype)
    tl.store(x + row * H + c, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / H + eps)
    tl.store(h + row * H + c, weights * (values * scale).to(dtype), mask=inside)
