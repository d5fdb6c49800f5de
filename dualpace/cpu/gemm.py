"""Linear layers on tiles: weights in tile order, float32 sums, fused epilogues, bf16 out.

For 1 to a few hundred rows. A weight is read once a call whatever the rows; few rows are limited by
that read, many by what multiplies: AMX's tile unit, or vectors that multiply bf16 pairs, on the
same tiles. This file knows nothing about models, and needs neither to be imported or compiled.
"""

import functools
from enum import IntEnum
from typing import Any, NamedTuple

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
_HALVED_TILES = 8  # of rows, from which on the last pairs are divided by rows too
_INPUT_TILES = 512  # of a block of inputs, all rows
_K_BLOCKS = (32, 128)  # its least and greatest width, tiles; multiples of the kernel's copies
SHAPES = (amx_ir.Shape(2, 2), amx_ir.Shape(4, 1))  # of the tile unit


class Unit(NamedTuple):
    """What multiplies: AMX tiles or 512-bit vectors; if not native, a stand-in for it that runs on
    any CPU, slowly (tests).
    """

    tiles: bool
    native: bool = True

    @property
    def shapes(self) -> tuple[amx_ir.Shape, ...]:
        return SHAPES if self.tiles else (amx_ir.VECTORS,)

    def failure(self) -> str | None:
        """Why it cannot be used here, or None."""
        if not self.native:
            return None
        level, name = (
            (Level.AMX, "AMX tiles") if self.tiles else (Level.AVX512_BF16, "bf16 vectors")
        )
        if not detected().has(level):
            return f"{name} cannot be used here ({detected().reason})"
        if self.tiles and not amx_probe.request_permission():
            return f"{name} cannot be used here: the kernel does not grant them to this process"
        return None


TILES, VECTORS = Unit(True), Unit(False)


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

    bias: [out], added in float32. Layers that run after each other should share one `scratch`: it
    is several megabytes, and touching new ones costs time. whole_heads: a head's outputs stay with
    one thread (ROPE only).
    Raises ValueError for a weight that is not bf16 or does not fit (see `fits`), RuntimeError if
    the unit cannot be used here.
    """

    def __init__(
        self,
        weight: Tensor,
        epilogue: Epilogue = Epilogue.PLAIN,
        unit: Unit = TILES,
        scratch: Scratch | None = None,
        head_dim: int = 32,
        bias: Tensor | None = None,
        whole_heads: bool = False,
    ) -> None:
        outputs, inputs = weight.shape
        if weight.dtype != torch.bfloat16 or not fits(outputs, inputs):
            raise ValueError(
                f"a tile weight is bf16 with sizes that are multiples of 32, not {weight.dtype} "
                f"[{outputs}, {inputs}]"
            )
        if failure := unit.failure():
            raise RuntimeError(failure)
        self.epilogue, self.inputs = epilogue, inputs
        self.outputs = outputs // 2 if epilogue == Epilogue.SILU_MUL else outputs
        self._pairs = outputs // 32
        self._scratch = scratch or Scratch()
        # Outputs that an epilogue takes together lie in one pair of tiles.
        together = {Epilogue.SILU_MUL: outputs, Epilogue.ROPE: head_dim}.get(epilogue, 32)
        self._weight = _in_tile_order(weight, together)
        self._bias = None if bias is None else _in_pairs(bias.float(), together).contiguous()
        self._pieces = head_dim // 32 if whole_heads else 1  # pairs that stay together
        self._shapes = unit.shapes
        self._config = torch.frombuffer(bytearray(amx_probe.tile_config()), dtype=torch.uint8)
        # All of them now, so that nothing compiles once requests are served.
        self._functions = {s: kernel.gemm_kernel(s, unit.native) for s in self._shapes}
        self.call(MAX_ROWS)  # room for all there will be; pages are taken when they are written

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
            call, outs, others = self.call(len(x[piece])), out[piece], other[piece]
            call.block[kernel.INPUT] = x[piece].data_ptr()
            call.block[kernel.INPUT_STRIDE] = x.stride(0) * 2
            call.block[kernel.OUT] = outs.data_ptr()
            call.block[kernel.OUT_STRIDE] = outs.stride(0) * 2
            call.block[kernel.OTHER] = others.data_ptr()
            call.block[kernel.OTHER_STRIDE] = others.stride(0) * 2
            call()
        return out

    def call(self, rows: int) -> "Call":
        """A call of the kernel for up to MAX_ROWS rows, which may be made again and again while
        the scratch memory is not replaced; what it reads and writes is the caller's to fill in.
        """
        k_tiles, threads, row_tiles = self.inputs // 32, torch.get_num_threads(), count_tiles(rows)
        groups = divide(self._pairs, threads, row_tiles, self._pieces)
        sums_bytes = int((groups[:, 1] - groups[:, 0]).max()) * row_tiles * 2 * amx_ir.TILE
        tiles, sums = self._scratch.take(row_tiles * k_tiles * amx_ir.TILE, threads * sums_bytes)
        # The tile unit's use is whichever was measured faster.
        function = self._functions[self._shapes[0 if row_tiles >= 3 else -1]]
        call = Call(function, kernel.NUM_FIELDS, kernel.CONFIG, threads)
        call.kept = (groups, self._config)
        call.block[kernel.CONFIG] = self._config.data_ptr()
        call.block[kernel.NUM_ROWS] = rows
        call.block[kernel.K_TILES] = k_tiles
        call.block[kernel.K_BLOCK] = input_block(row_tiles)
        call.block[kernel.NUM_GROUPS] = len(groups)
        call.block[kernel.GROUPS] = groups.ctypes.data
        call.block[kernel.INPUT_TILES] = tiles
        call.block[kernel.WEIGHT], call.block[kernel.BIAS] = self.address, self.bias_address
        call.block[kernel.SUMS] = sums
        call.block[kernel.SUMS_STRIDE] = sums_bytes
        call.block[kernel.EPILOGUE] = self.epilogue
        return call

    @property
    def address(self) -> int:
        """Of the weights."""
        return self._weight.data_ptr()

    @property
    def bias_address(self) -> int:
        return 0 if self._bias is None else self._bias.data_ptr()

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


Block = NDArray[np.int64]  # the argument block of a kernel


class Call:
    """A kernel, its argument block, which begins with counters, and how many threads run it."""

    def __init__(self, function: int, num_fields: int, num_counters: int, threads: int) -> None:
        self.function, self.num_counters = function, num_counters
        self.block = np.zeros(num_fields, np.int64)
        self.kept: tuple[Any, ...] = ()  # memory that the block refers to
        self._counters, self._threads = self.block[:num_counters], threads
        self._address = self.block.ctypes.data

    def __call__(self) -> None:
        self._counters[:] = 0
        parallel(self.function, self._address, self._threads)


def count_tiles(rows: int) -> int:
    """Tiles that hold so many rows."""
    return -(-rows // amx_ir.ROWS)


def input_block(row_tiles: int) -> int:
    """Tiles of inputs that are worked on at a time."""
    return min(max(_INPUT_TILES // row_tiles // 16 * 16, _K_BLOCKS[0]), _K_BLOCKS[1])


@functools.cache
def divide(pairs: int, threads: int, row_tiles: int, together: int = 1) -> NDArray[np.int32]:
    """The groups of outputs that threads take: int32 [groups, 4], first and end pair of output
    tiles, first and end tile of rows. No group cuts `together` pairs from each other.

    Large groups first, since each reads the activations once; then smaller ones, so that threads
    that are held up, and those that share a core, leave work to the others; the last pairs of all,
    if there are many rows, by halves of the rows.
    """
    most = min(_MOST_PAIRS, _SUMS_BYTES // (row_tiles * 2 * amx_ir.TILE))
    pairs, most = pairs // together, max(1, most // together)
    divisor = threads * (4 if row_tiles <= 8 else 2)
    halved = min(pairs, threads) if row_tiles >= _HALVED_TILES else 0
    groups, begin = [], 0
    while begin < pairs:
        size = min(most, max(1, (pairs - begin) // divisor))
        if pairs - begin > halved:
            groups.append((begin, begin + size, 0, row_tiles))
        else:
            middle = row_tiles // 2
            groups += [(begin, begin + 1, 0, middle), (begin, begin + 1, middle, row_tiles)]
            size = 1
        begin += size
    return np.array(groups, np.int32) * np.array([together, together, 1, 1], np.int32)


def _in_tile_order(weight: Tensor, together: int) -> Tensor:
    """[out, in] as tiles [out / 32, in / 32, 2, 16 pairs of inputs, 16 outputs, 2]."""
    outputs, inputs = weight.shape
    halves = _in_pairs(weight, together).view(outputs // 32, 2, 16, inputs // 32, 16, 2)
    tiles = halves.permute(0, 3, 1, 4, 2, 5)
    packed = huge_empty(weight.numel() * 2).view(torch.bfloat16).view(tiles.shape)
    return packed.copy_(tiles)


def _in_pairs(outputs: Tensor, together: int) -> Tensor:
    """[out, ...] in the order of pairs of tiles, each of which holds 16 of the first half of
    `together` outputs and the same 16 of the second.
    """
    count, *rest = outputs.shape
    halves = outputs.view(count // together, 2, together // 32, 16, *rest)
    return halves.transpose(1, 2).reshape(count, *rest)
