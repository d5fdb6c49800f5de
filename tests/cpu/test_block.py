"""The vector code of one KV block, for every kind of CPU, head size and group, against float64.

16-lane code runs on any CPU (the compiler halves the vectors), and the two bf16 instructions have a
stand-in, so that what this machine lacks is checked for its arithmetic here and for its
instructions in test_assembly.
"""

import ctypes

import numpy as np
import pytest
from llvmlite import binding as llvm
from llvmlite import ir
from numpy.typing import NDArray

from dualpace.cpu.block_ir import LOWEST, BlockShape, block_function
from dualpace.cpu.tile_block_ir import takes_tiles, tile_block_function

Floats = NDArray[np.float32]


class Block:
    """A compiled block function with the buffers it needs."""

    def __init__(self, shape: BlockShape) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        module = ir.Module()
        function = (tile_block_function if shape.tiles else block_function)(module, shape)
        function.linkage = "external"
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=1
        )
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
        self.engine.finalize_object()
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.call = ctypes.CFUNCTYPE(
            None, *[pointer] * 5, number, ctypes.c_float, pointer, pointer
        )(self.engine.get_function_address(function.name))
        self.shape = shape
        self.state = np.zeros(shape.state_floats, np.float32)
        self.state[shape.group * shape.head_dim :][: shape.parts * shape.lanes] = LOWEST
        self.work = np.full(shape.work_floats, np.nan, np.float32)

    def query(self, q: Floats) -> NDArray[np.uint8]:
        shape = self.shape
        if shape.tiles:
            pairs = np.zeros((shape.head_dim // 2, shape.pad), np.uint32)
            pairs[:, : shape.group] = bits(q).view(np.uint32).T
            return pairs.view(np.uint8)
        if shape.dot:
            rows = np.zeros((shape.group, shape.query_row // 2), np.uint16)
            rows[:, : shape.head_dim] = bits(q)
            return rows.view(np.uint8)
        rows32 = np.empty_like(q)
        rows32[:, shape.place()] = q
        return rows32.view(np.uint8)

    def attend(self, q: Floats, k: Floats, v: Floats, tokens: int, scale: float) -> None:
        stored = [np.ascontiguousarray(bits(x) if self.shape.bf16 else x) for x in (k, v)]
        query = np.ascontiguousarray(self.query(q))
        arrays = [query, *stored, self.state, self.work]
        at = [array.ctypes.data for array in arrays]
        self.call(*at, tokens, scale, at[1], at[2])

    def result(self) -> Floats:
        shape = self.shape
        width = shape.group * shape.head_dim
        sums = self.state[width + shape.parts * shape.lanes :]
        total = np.array([sums[shape.lane(head)] for head in range(shape.group)])
        acc = self.state[:width].reshape(shape.group, -1)[:, shape.place()]
        return acc / total[:, None]


def bits(x: Floats) -> NDArray[np.uint16]:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def sample(rng: np.random.Generator, *size: int) -> Floats:
    """Normal numbers that bf16 holds exactly."""
    x = rng.standard_normal(size).astype(np.float32)
    return (x.view(np.uint32) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def expected(q: Floats, k: Floats, v: Floats, scale: float) -> NDArray[np.float64]:
    scores = q.astype(np.float64) @ k.astype(np.float64).T * scale
    weights = np.exp2(scores - scores.max(1, keepdims=True))
    return weights @ v.astype(np.float64) / weights.sum(1, keepdims=True)


KINDS = {
    "avx2": {"lanes": 8, "bf16": True},
    "avx512": {"lanes": 16, "bf16": True},
    "avx512_bf16": {"lanes": 16, "bf16": True, "dot": True, "native": False},
    "amx": {"lanes": 16, "bf16": True, "dot": True, "native": False, "tiles": True},
    "float32": {"lanes": 8, "bf16": False},
    "float32_avx512": {"lanes": 16, "bf16": False},
}
# Every head size, every group, every kind at both a power of two and not.
SIZES = [(64, 1), (64, 3), (80, 2), (96, 5), (128, 4), (128, 7), (256, 10)]


CASES = [(d, g, kind) for d, g in SIZES for kind in KINDS if kind != "amx" or takes_tiles(d, g)]


@pytest.mark.parametrize(("dim", "group", "kind"), CASES)
def test_block(dim: int, group: int, kind: str) -> None:
    block = Block(BlockShape(dim, group, **KINDS[kind]))
    rng = np.random.default_rng()
    q, k, v = sample(rng, group, dim), sample(rng, 40, dim), sample(rng, 40, dim)
    scale = dim**-0.5
    for first in (0, 16, 32):
        tokens = min(16, 40 - first)
        tail = np.full((16 - tokens, dim), 3.0e38, np.float32)  # no more than finite is promised
        part = [np.concatenate([x[first : first + tokens], tail]) for x in (k, v)]
        block.attend(q, *part, tokens, scale)
    error = np.abs(block.result() - expected(q, k, v, scale)).max()
    # With `dot` the weights are rounded to bf16: 2^-9 of each, of either sign.
    assert error < (2**-7 if KINDS[kind].get("dot") else 4e-6)


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_keeps_its_heads_apart(group: int) -> None:
    block = Block(BlockShape(16, group, lanes=8, bf16=False))
    rng = np.random.default_rng()
    q, k, v = sample(rng, group, 16), sample(rng, 16, 16), sample(rng, 16, 16)
    block.attend(q, k, v, 16, 1.0)
    assert np.abs(block.result() - expected(q, k, v, 1.0)).max() < 4e-6


@pytest.mark.parametrize("kind", ["avx2", "avx512_bf16", "amx"])
@pytest.mark.parametrize("size", [1e4, -1e4, 1e12])
def test_extreme_scores_choose_one_token(size: float, kind: str) -> None:
    block = Block(BlockShape(64, 4, **KINDS[kind]))
    rng = np.random.default_rng()
    q, k, v = sample(rng, 4, 64), sample(rng, 32, 64), sample(rng, 32, 64)
    for first in (0, 16):
        block.attend(q, k[first : first + 16], v[first : first + 16], 16, size)
    result = block.result()
    assert np.isfinite(result).all()
    assert np.abs(result - expected(q, k, v, size)).max() < 2**-6
