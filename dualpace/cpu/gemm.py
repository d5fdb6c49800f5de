"""Linear layers on AMX tiles: weights in tile order, float32 sums, fused epilogues, bf16 out.

For 1 to a few hundred rows. A weight is read once a call whatever the rows; few rows are limited by
that read, many by the tile unit. This file knows nothing about models, and needs the tile unit only
to run, not to be imported or compiled.
"""

import functools
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualpace.cpu import amx_ir, amx_probe
from dualpace.cpu import gemm_kernel as kernel
from dualpace.cpu.isa import Level, detected
from dualpace.cpu.memory import Scratch, huge_empty
from dualpace.cpu.openmp import parallel

MAX_ROWS = 512
# Chosen so that sums, activations and two pieces of weights share a second-level cache of 2 MiB.
_SUMS_BYTES = 1 << 18
_MOST_PAIRS = 8  # of output tiles in a group
_INPUT_TILES = 512  # of a block of inputs, all rows
_K_BLOCKS = (32, 128)  # its least and greatest width, tiles; multiples of the kernel's copies
SHAPES = (amx_ir.Shape(2, 2), amx_ir.Shape(4, 1))


class Epilogue(IntEnum):
    """What happens to the sums before they are rounded to bf16."""

    PLAIN = amx_ir.PLAIN
    ADD = amx_ir.ADD  # a residual is added
    SILU_MUL = amx_ir.SILU_MUL  # the weight is [gate; up]: silu(gate) * up, half as many outputs
    ROPE = amx_ir.ROPE  # outputs are heads of q, k and v: see qkv.PreAttention


def fits(out_features: int, in_features: int) -> bool:
    """Whether the tile GEMM takes a weight of this size: both multiples of 32."""
    return out_features % 32 == 0 and in_features % 32 == 0


class TileLinear:
    """x [rows, in] bf16 -> [rows, out] bf16 for one weight [out, in], which is copied.

    native=False computes the same without a tile unit, slowly (tests). Layers that run after each
    other should share one `scratch`: it is several megabytes, and touching new ones costs time.
    Raises ValueError for a weight that is not bf16 or does not fit (see `fits`), RuntimeError if
    the tile unit cannot be used here.
    """

    def __init__(
        self,
        weight: Tensor,
        epilogue: Epilogue = Epilogue.PLAIN,
        native: bool = True,
        scratch: Scratch | None = None,
        head_dim: int = 32,
    ) -> None:
        outputs, inputs = weight.shape
        if weight.dtype != torch.bfloat16 or not fits(outputs, inputs):
            raise ValueError(
                f"a tile weight is bf16 with sizes that are multiples of 32, not {weight.dtype} "
                f"[{outputs}, {inputs}]"
            )
        if native and not (detected().has(Level.AMX) and amx_probe.request_permission()):
            raise RuntimeError(f"AMX tiles cannot be used here ({detected().reason})")
        self.epilogue, self.inputs = epilogue, inputs
        self.outputs = outputs // 2 if epilogue == Epilogue.SILU_MUL else outputs
        self._pairs = outputs // 32
        self._scratch = scratch or Scratch()
        # Outputs that an epilogue takes together lie in one pair of tiles.
        unit = {Epilogue.SILU_MUL: outputs, Epilogue.ROPE: head_dim}.get(epilogue, 32)
        self._weight = _in_tile_order(weight, unit)
        self._config = torch.frombuffer(bytearray(amx_probe.tile_config()), dtype=torch.uint8)
        # All of them now, so that nothing compiles once requests are served.
        self._functions = {shape: kernel.gemm_kernel(shape, native) for shape in SHAPES}

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x [rows, in]; residual [rows, out] with ADD only; out [rows, out], made if not given."""
        assert self.epilogue != Epilogue.ROPE  # whose results go elsewhere
        rows = x.shape[0]
        out = x.new_empty(rows, self.outputs) if out is None else out
        other = residual if residual is not None else out
        self._check(x, residual, out)
        for first in range(0, rows, MAX_ROWS):
            piece = slice(first, first + MAX_ROWS)
            outs, others = out[piece], other[piece]
            self._run(
                x[piece],
                {
                    kernel.OUT: outs.data_ptr(),
                    kernel.OUT_STRIDE: outs.stride(0) * 2,
                    kernel.OTHER: others.data_ptr(),
                    kernel.OTHER_STRIDE: others.stride(0) * 2,
                },
            )
        return out

    def _run(self, x: Tensor, ends: dict[int, int]) -> None:
        """One call of the kernel; `ends` are the fields that the epilogue takes."""
        rows, k_tiles, threads = x.shape[0], self.inputs // 32, torch.get_num_threads()
        row_tiles = -(-rows // amx_ir.ROWS)
        starts = group_starts(self._pairs, threads, row_tiles)
        k_block = min(max(_INPUT_TILES // row_tiles // 16 * 16, _K_BLOCKS[0]), _K_BLOCKS[1])
        largest = int(np.diff(starts).max())
        sums_bytes = largest * row_tiles * 2 * amx_ir.TILE
        tiles, sums = self._scratch.take(row_tiles * k_tiles * amx_ir.TILE, threads * sums_bytes)
        fields = {
            kernel.CONFIG: self._config.data_ptr(),
            kernel.NUM_ROWS: rows,
            kernel.K_TILES: k_tiles,
            kernel.K_BLOCK: k_block,
            kernel.NUM_GROUPS: len(starts) - 1,
            kernel.GROUP_STARTS: starts.ctypes.data,
            kernel.INPUT: x.data_ptr(),
            kernel.INPUT_STRIDE: x.stride(0) * 2,
            kernel.INPUT_TILES: tiles,
            kernel.WEIGHT: self._weight.data_ptr(),
            kernel.SUMS: sums,
            kernel.SUMS_STRIDE: sums_bytes,
            kernel.EPILOGUE: self.epilogue,
            **ends,
        }
        block = np.zeros(kernel.NUM_FIELDS, np.int64)
        block[list(fields)] = list(fields.values())
        parallel(self._functions[tile_shape(row_tiles)], block.ctypes.data, threads)

    def _check(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        if (residual is not None) != (self.epilogue == Epilogue.ADD):
            raise ValueError("a residual is given with the epilogue ADD, and only then")
        for name, tensor, width in (
            ("x", x, self.inputs),
            ("residual", residual, self.outputs),
            ("out", out, self.outputs),
        ):
            if tensor is None:
                continue
            shaped = tensor.shape == (x.shape[0], width) and tensor.stride(1) == 1
            if not shaped or tensor.dtype != torch.bfloat16:
                raise ValueError(f"{name} must be bf16 [{x.shape[0]}, {width}] with whole rows")


def tile_shape(row_tiles: int) -> amx_ir.Shape:
    """The use of the tile registers for so many tiles of rows: whichever was measured faster."""
    return SHAPES[0] if 3 <= row_tiles <= 8 else SHAPES[1]


@functools.cache
def group_starts(pairs: int, threads: int, row_tiles: int) -> NDArray[np.int32]:
    """Where the groups of pairs of output tiles begin that threads take, and `pairs`.

    Large groups first, since each reads the activations once; then smaller ones, so that threads
    that are held up, and those that share a core, leave work to the others.
    """
    most = max(1, min(_MOST_PAIRS, _SUMS_BYTES // (row_tiles * 2 * amx_ir.TILE)))
    divisor = threads * (4 if row_tiles <= 8 else 2)
    starts = [0]
    while starts[-1] < pairs:
        rest = pairs - starts[-1]
        starts.append(starts[-1] + min(most, max(1, rest // divisor)))
    return np.array(starts, np.int32)


def _in_tile_order(weight: Tensor, unit: int) -> Tensor:
    """[out, in] as tiles [out / 32, in / 32, 2, 16 pairs of inputs, 16 outputs, 2].

    A pair of tiles holds 16 of the first half of `unit` outputs and the same 16 of the second.
    """
    outputs, inputs = weight.shape
    halves = weight.view(outputs // unit, 2, unit // 32, 16, inputs).transpose(1, 2)
    tiles = halves.reshape(outputs // 32, 2, 16, inputs // 32, 16, 2).permute(0, 3, 1, 4, 2, 5)
    packed = huge_empty(weight.numel() * 2).view(torch.bfloat16).view(tiles.shape)
    return packed.copy_(tiles)
