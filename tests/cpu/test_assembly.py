"""The vector code for CPUs that this machine may not be: compiled, and its instructions read."""

import os
import re
import subprocess
import sys
import tempfile

import pytest
from llvmlite import binding as llvm
from llvmlite import ir

from dualpace.cpu.block_ir import BlockShape, block_function
from dualpace.cpu.few_rows_ir import rows_function
from dualpace.cpu.tile_block_ir import tile_block_function
from tests.servers import PATIENCE_S


@pytest.fixture(scope="module", autouse=True)
def _llvm() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def assembly(shape: BlockShape, cpu: str) -> str:
    module = ir.Module()
    build = tile_block_function if shape.tiles else block_function
    build(module, shape).linkage = "external"
    return compiled(module, cpu)


def compiled(module: ir.Module, cpu: str) -> str:
    parsed = llvm.parse_assembly(str(module))
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=cpu, opt=3)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        parsed, llvm.create_pass_builder(machine, options)
    )
    return machine.emit_assembly(parsed)


def count(text: str, instruction: str) -> int:
    return len(re.findall(rf"^\s+{instruction}\b", text, re.MULTILINE))


@pytest.mark.parametrize("cpu", ["sapphirerapids", "znver4"])
def test_bf16_products_use_whole_registers(cpu: str) -> None:
    text = assembly(BlockShape(128, 4, 16, bf16=True, dot=True), cpu)
    products = re.findall(r"vdpbf16ps.*", text)
    # Scores, once a loop of 4 tokens: 4 pieces of a row x 4 heads x 4 tokens. Values, once a loop
    # over chunks of 64: 8 pairs of tokens x 4 vectors x 4 heads.
    assert len(products) >= 64 + 8 * 2 * 4
    assert all("zmm" in line for line in products)
    assert count(text, "vcvtneps2bf16") >= 1
    assert count(text, "prefetcht1") >= 2
    assert not spills(text)


@pytest.mark.parametrize(("dim", "group"), [(64, 1), (96, 3), (128, 4), (128, 8), (256, 5)])
def test_keys_and_values_go_from_memory_to_the_tile_unit(dim: int, group: int) -> None:
    text = assembly(BlockShape(dim, group, 16, True, True, tiles=True), "sapphirerapids")
    pieces = dim // 32
    assert count(text, "tdpbf16ps") == 2 * pieces
    # Keys, queries, sums and values; weights once.
    assert count(text, "tileloadd") == 4 * pieces + 1
    assert count(text, "tilestored") == pieces + 1
    assert count(text, "prefetcht0") == 2 * 16 * dim * 2 // 64
    # Of each product's 16 tokens only exponentials and their conversion are left to vectors.
    assert "vdpbf16ps" not in text
    narrowed = re.findall(r"vcvtneps2bf16\s.*, %([xyz])mm", text)
    assert narrowed == ["y"] * group
    assert "%ymm" not in re.sub(r"v(cvtneps2bf16|pmovzxwd)\s.*", "", text)


@pytest.mark.parametrize("cpu", ["skylake-avx512", "znver4"])
def test_avx512_without_bf16_multiplies_in_whole_registers(cpu: str) -> None:
    text = assembly(BlockShape(128, 4, 16, bf16=True), cpu)
    assert "vdpbf16ps" not in text
    multiplies = re.findall(r"vfmadd\w+ps.*", text)
    assert len(multiplies) > 200
    assert sum("zmm" in line for line in multiplies) == len(multiplies)
    assert not spills(text)


def test_avx2_keeps_accumulators_in_registers() -> None:
    text = assembly(BlockShape(128, 4, 8, bf16=True), "znver3")
    assert "zmm" not in text
    multiplies = re.findall(r"vfmadd\w+ps.*", text)
    assert sum("ymm" in line for line in multiplies) == len(multiplies) > 200
    assert not spills(text)


@pytest.mark.parametrize(
    ("cpu", "lanes", "register"),
    [("znver3", 8, "y"), ("haswell", 8, "y"), ("skylake-avx512", 16, "z")],
)
def test_sums_of_few_rows_stay_in_registers(cpu: str, lanes: int, register: str) -> None:
    module = ir.Module()
    rows_function(module, lanes).linkage = "external"
    text = compiled(module, cpu)
    multiplies = re.findall(r"vfmadd\w+ps.*", text)
    # For 1, 2 and 4 rows, a whole vector of inputs and what is left of them.
    assert len(multiplies) >= 2 * 3 * lanes
    assert all(f"{register}mm" in line for line in multiplies)
    assert count(text, "prefetcht1") >= 1
    assert not spills(text)


def spills(text: str) -> int:
    """Vector registers written to the stack inside the loops over tokens and over chunks."""
    inside = re.findall(r"^(\.LBB\d+_\d+):$(.*?)^\s+j\w+\s+\1$", text, re.MULTILINE | re.DOTALL)
    assert inside
    stores = re.compile(r"vmov\w+\s+%[xyz]mm\d+, -?\d*\(%r[sb]p\)")
    return sum(len(stores.findall(body)) for _, body in inside)


_IMPORTS = """
from dualpace.cpu import amx_ir, ceilings, decode_kernel, gemm, gemm_kernel
from dualpace.cpu.block_ir import BlockShape
"""
_WITH_TILES = """
assert gemm_kernel.gemm_kernel(gemm.SHAPES[1], True)
assert decode_kernel.decode_kernel(BlockShape(64, 1, 16, True, True, tiles=True))
assert ceilings._tile_spinner()
"""
_WITHOUT = """
assert gemm_kernel.gemm_kernel(amx_ir.VECTORS, True)
assert decode_kernel.decode_kernel(BlockShape(64, 1, 16, True, True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "tiles", "code"),
    [("sapphirerapids", ["amx-tile", "amx-bf16"], _WITH_TILES), ("znver4", [], _WITHOUT)],
)
def test_whole_kernels_compile_for_a_cpu_with(cpu: str, tiles: list[str], code: str) -> None:
    """In a child process: the compiler ends the process over what it cannot encode."""
    avx512 = [f"avx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")]
    features = ["avx2", "fma", *avx512, *tiles]
    target = {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in features),
    }
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, **target, "NUMBA_CACHE_DIR": cache}
        command = [sys.executable, "-c", _IMPORTS + code]
        subprocess.run(command, env=environment, check=True, timeout=PATIENCE_S)
