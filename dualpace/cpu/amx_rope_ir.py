# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""The epilogues of the QKV product as vector code: norm of heads, rotation, and rows to where they
belong.

A pair of tiles holds 16 elements of the first half of a head and the 16 of the second half that are
rotated with them. This file knows nothing about threads, heads or blocks.
"""

from llvmlite import ir

from dualpace.cpu.amx_ir import TILE, _counted
from dualpace.cpu.vector_ir import F32, I16, I32, I64, POINTER, VOID, Vectors, declare


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


def norm_function(module: ir.Module, native: bool) -> ir.Function:
    """`void f(c, int64 stride, int64 pieces, int64 rows, weight, int64 epsilon)` in `module`.

    RMSNorm of `rows` rows of a head whose `pieces` pairs of tiles of float32 lie `stride` bytes
    apart from c on, in place. Rounded to bf16 before, before the weight (bf16, in the head's order)
    and after, as the stage's source is; epsilon is the bits of a float32.
    """
    args = [POINTER, I64, I64, I64, POINTER, I64]
    function = ir.Function(module, ir.FunctionType(VOID, args), f"tiles_norm_{int(native)}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    c, stride, pieces, rows, weight, epsilon = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, half = Vectors(builder, 16, native), ir.VectorType(I16, 16)
    width = builder.uitofp(builder.mul(pieces, I64(32)), F32)
    least = builder.bitcast(builder.trunc(epsilon, I32), F32)
    with builder.goto_entry_block():
        squares = builder.alloca(x.type)

    def places(row: ir.Value, piece: ir.Value) -> list[ir.Value]:
        """Addresses of a row of both tiles of a piece."""
        first = x.at(x.at(c, builder.mul(row, I64(64))), builder.mul(piece, stride))
        return [first, x.at(first, TILE)]

    with _counted(builder, rows) as row:
        builder.store(x.constant(0.0), squares)
        with _counted(builder, pieces) as piece:
            total = builder.load(squares, typ=x.type)
            for place in places(row, piece):
                value = x.widen(x.narrow(x.load(place, 0)))
                x.store(value, place, 0)
                total = x.fma(value, value, total)
            builder.store(total, squares)
        total = x.fold(builder.load(squares, typ=x.type), 1, x.add)
        mean = builder.fdiv(builder.extract_element(total, I32(0)), width)
        root = builder.call(declare(module, "llvm.sqrt.f32", F32, F32), [builder.fadd(mean, least)])
        scale = x.splat(builder.fdiv(ir.Constant(F32, 1.0), root))
        with _counted(builder, pieces) as piece:
            at = x.at(weight, builder.mul(piece, I64(32)))
            for place in places(row, piece):
                normal = x.widen(x.narrow(x.mul(x.load(place, 0), scale)))
                factor = x.widen(builder.load(at, typ=half, align=2))
                x.store(x.widen(x.narrow(x.mul(normal, factor))), place, 0)
                at = x.at(at, builder.mul(pieces, I64(32)))
    builder.ret_void()
    return function
