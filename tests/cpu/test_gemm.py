"""The tile GEMM: arithmetic through a stand-in for the tile unit, instructions by reading them."""

import re

import numpy as np
import pytest
import torch
from llvmlite import binding as llvm
from llvmlite import ir

from dualpace.cpu import amx_ir, amx_rope_ir, vector_gemm_ir
from dualpace.cpu.gemm import SHAPES, Epilogue, TileLinear, Unit, divide, fits
from dualpace.cpu.isa import Level, detected
from dualpace.cpu.memory import Scratch

# On a CPU with AMX the unit itself is tested.
UNIT = Unit(True, detected().has(Level.AMX))
VECTORS = Unit(False, detected().has(Level.AVX512_BF16))
ROW_EPILOGUES = (Epilogue.PLAIN, Epilogue.ADD, Epilogue.SILU_MUL)  # the other is test_qkv's


def bf16(*size: int) -> torch.Tensor:
    return torch.randn(*size).to(torch.bfloat16)


def expected(
    x: torch.Tensor,
    weight: torch.Tensor,
    epilogue: Epilogue,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    y = x.double() @ weight.double().T
    y = y if bias is None else y + bias.double()
    if epilogue == Epilogue.SILU_MUL:
        gate, up = y.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize("epilogue", ROW_EPILOGUES)
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64, 140])
@pytest.mark.parametrize("unit", [UNIT, VECTORS], ids=["tiles", "vectors"])
def test_matches_float64(rows: int, epilogue: Epilogue, unit: Unit) -> None:
    outputs, inputs = 192, 96
    x, weight, bias = bf16(rows, inputs), bf16(outputs, inputs), bf16(outputs)
    linear = TileLinear(weight, epilogue, unit, bias=bias if rows % 2 else None)
    residual = bf16(rows, outputs) if epilogue == Epilogue.ADD else None
    out = torch.full((rows + 1, linear.outputs), float("nan"), dtype=torch.bfloat16)
    linear(x, residual, out[:rows])
    assert out[rows].isnan().all()
    exact = expected(x, weight, epilogue, residual, bias if rows % 2 else None)
    torch.testing.assert_close(out[:rows].double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("unit", [UNIT, VECTORS], ids=["tiles", "vectors"])
def test_many_blocks_of_inputs_and_strided_rows(unit: Unit) -> None:
    wide, weight = bf16(20, 3000), bf16(64, 2080)  # 65 tiles: two whole blocks and one tile
    x = wide[:, 500:2580]
    exact = x.double() @ weight.double().T
    result = TileLinear(weight, Epilogue.PLAIN, unit)(x)
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-2)


def test_more_rows_than_one_piece() -> None:
    x, weight = bf16(530, 32), bf16(32, 32)
    result = TileLinear(weight, Epilogue.PLAIN, UNIT)(x)
    torch.testing.assert_close(
        result.double(), x.double() @ weight.double().T, rtol=2**-8, atol=1e-3
    )


def test_layers_share_scratch_that_grows() -> None:
    scratch = Scratch()
    layers = [TileLinear(bf16(64, n), unit=UNIT, scratch=scratch) for n in (64, 512, 64)]
    inputs = [bf16(rows, layer.inputs) for rows, layer in zip((3, 40, 17), layers, strict=True)]
    alone = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    for layer, x, expected_again in zip(layers[::-1], inputs[::-1], alone[::-1], strict=True):
        assert torch.equal(layer(x), expected_again)


def test_silu_of_large_gates_is_a_number() -> None:
    weight = torch.eye(32).to(torch.bfloat16)
    x = torch.full((2, 32), 1e4, dtype=torch.bfloat16)
    x[1, :16] = -1e4
    y = TileLinear(weight, Epilogue.SILU_MUL, UNIT)(x).float()
    torch.testing.assert_close(y[0], x[0, :16].float() * x[0, 16:].float(), rtol=2**-8, atol=0)
    assert (y[1].abs() < 1e-20).all()


def test_misfits_are_refused() -> None:
    assert fits(576, 1536) and not fits(100, 64)
    with pytest.raises(ValueError, match="multiples of 32"):
        TileLinear(bf16(100, 64), unit=UNIT)
    linear = TileLinear(bf16(64, 32), unit=UNIT)
    if not UNIT.native:
        with pytest.raises(RuntimeError, match="AMX"):
            TileLinear(bf16(64, 32))
    if not VECTORS.native:
        with pytest.raises(RuntimeError, match="bf16 vectors"):
            TileLinear(bf16(64, 32), unit=Unit(False))
    with pytest.raises(ValueError, match="residual"):
        linear(bf16(2, 32), bf16(2, 64))
    with pytest.raises(ValueError, match="x must be"):
        linear(bf16(2, 64))


@pytest.mark.parametrize("row_tiles", [1, 4, 16, 32])
@pytest.mark.parametrize(
    ("pairs", "threads", "together"),
    [(896, 16, 1), (192, 16, 1), (192, 16, 4), (18, 16, 2), (128, 13, 1), (1, 4, 1)],
)
def test_groups_cover_the_outputs_and_shrink(
    pairs: int, threads: int, together: int, row_tiles: int
) -> None:
    groups = divide(pairs, threads, row_tiles, together)
    assert (groups[:, :2] % together == 0).all()
    times = np.zeros((pairs, row_tiles), int)
    for begin, end, top, bottom in groups:
        times[begin:end, top:bottom] += 1
    assert (times == 1).all()
    sizes = (groups[:, 1] - groups[:, 0]) * (groups[:, 3] - groups[:, 2])
    # The last are the smallest, for who comes first.
    assert (np.diff(sizes) <= row_tiles % 2 * together).all()
    assert sizes[-1] <= row_tiles * together
    assert sizes[0] <= max(together, pairs // threads) * row_tiles
    # What a thread keeps of sums fits its share of a second-level cache.
    assert sizes[0] * 2 * amx_ir.TILE <= 1 << 18


def assembly(build: "object", *args: object, cpu: str = "sapphirerapids") -> str:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module()
    build(module, *args).linkage = "external"  # type: ignore[operator]
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=cpu, opt=3)
    return machine.emit_assembly(llvm.parse_assembly(str(module)))


@pytest.mark.parametrize("shape", SHAPES)
def test_inner_loops_are_tiles_only(shape: amx_ir.Shape) -> None:
    text = assembly(amx_ir.tile_function, shape, True)
    counts = range(1, shape.rows + 1)
    sums = shape.columns * sum(counts)
    assert text.count("tilezero") == text.count("tilestored") == sums
    assert text.count("tdpbf16ps") == sums
    assert text.count("tileloadd") == sums + sum(n + shape.columns for n in counts)
    assert "prefetcht1" in text
    assert "%zmm" not in text


@pytest.mark.parametrize("cpu", ["sapphirerapids", "znver4"])
def test_vectors_multiply_whole_registers_and_keep_their_sums(cpu: str) -> None:
    text = assembly(vector_gemm_ir.product_function, True, cpu=cpu)
    products = re.findall(r"vdpbf16ps\s.*", text)
    assert products and all(line.count("%zmm") + line.count("(") >= 3 for line in products)
    # Loops without loops inside: over pairs of inputs, for each number of rows.
    loops = re.findall(r"^(\.LBB\d+_\d+):((?:(?!\.LBB)[^\n]*\n)*?)^\s+j\w+\s+\1$", text, re.M)
    inner = [body for _, body in loops if "vdpbf16ps" in body]
    at_once = vector_gemm_ir.ROWS_AT_ONCE
    most = max(body.count("vdpbf16ps") for body in inner)
    assert most == 2 * 2 * at_once  # two pairs of inputs, both columns
    assert not any(re.search(r"vmov\w+\s+%zmm\d+, -?\d*\(%r[sb]p\)", body) for body in inner)
    assert "prefetcht1" in text


@pytest.mark.parametrize("kind", ROW_EPILOGUES)
def test_epilogues_convert_whole_vectors(kind: Epilogue) -> None:
    text = assembly(amx_ir.epilogue_function, int(kind), True)
    # A ymm of bf16 comes from a whole zmm of float32.
    conversions = re.findall(r"vcvtneps2bf16\s.*, %([xyz])mm", text)
    assert conversions == ["y"] * (1 if kind == Epilogue.SILU_MUL else 2)


def test_norm_of_heads_takes_whole_vectors() -> None:
    text = assembly(amx_rope_ir.norm_function, True)
    assert re.findall(r"vcvtneps2bf16\s.*, %([xyz])mm", text) == ["y"] * 6


def test_rotation_takes_whole_vectors() -> None:
    text = assembly(amx_rope_ir.rope_function, True)
    assert re.findall(r"vcvtneps2bf16\s.*, %([xyz])mm", text) == ["y"] * 4
