# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""The epilogue of the QKV product as vector code: rotate, and write rows to where they belong.

A pair of tiles holds 16 elements of the first half of a head and the 16 of the second half that are
rotated with them. This file knows nothing about threads, heads or blocks.
"""

from llvmlite import ir

from dualpace.cpu.amx_ir import TILE, _counted
from dualpace.cpu.vector_ir import I64, POINTER, VOID, Vectors


def rope_function(module: ir.Module, native: bool) -> ir.Function:
    """`void f(c, int64 rows, to, offsets, int64 half, cos, sin, int64 table_stride, int64 rotate)`
    in `module`.

    Rounds `rows` rows of a pair of tiles of float32 to bf16 and, with `rotate`, turns them by the
    angles of 16 float32 a row at cos and sin (stride in bytes), in float32, and rounds again. Row i
    goes to the address to + offsets[i] (int64 [rows]), its second 16 elements `half` bytes behind.
    """
    args = [POINTER, I64, POINTER, POINTER, I64, POINTER, POINTER, I64, I64]
    name = f"tiles_rope_{int(native)}"
    function = ir.Function(module, ir.FunctionType(VOID, args), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    c, rows, to, offsets, half, cos, sin, table_stride, rotate = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x = Vectors(builder, 16, native)
    with _counted(builder, rows) as row:
        source = x.at(c, builder.mul(row, I64(64)))
        place = x.at(to, x.load(offsets, builder.mul(row, I64(8)), I64))
        low, high = (x.narrow(x.load(source, at)) for at in (0, TILE))
        builder.store(low, place, align=2)
        builder.store(high, x.at(place, half), align=2)
        with builder.if_then(builder.icmp_signed("!=", rotate, I64(0))):
            angle = builder.mul(row, table_stride)
            cosines, sines = x.load(cos, angle), x.load(sin, angle)
            first, second = x.widen(low), x.widen(high)
            turned = x.sub(x.mul(first, cosines), x.mul(second, sines))
            builder.store(x.narrow(turned), place, align=2)
            turned = x.fma(second, cosines, x.mul(first, sines))
            builder.store(x.narrow(turned), x.at(place, half), align=2)
    builder.ret_void()
    return function
