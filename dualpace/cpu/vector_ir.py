# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""A small layer over llvmlite for kernels written in vector registers.

`Vectors` wraps an IR builder with the loads, stores, multiply-adds and shuffles that the kernels
use, for one vector width. The same functions emit into Numba's modules and into bare modules that
tests compile for other CPUs. This file knows nothing about attention.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
VOID = ir.VoidType()
POINTER = ir.PointerType()
# No NaN or infinity reaches these kernels, but neither is assumed away: masks rely on comparisons.
_FAST = ("contract", "reassoc", "nsz", "arcp")


class BFloat(ir.types.Type):
    """LLVM's `bfloat`, which llvmlite has no class for."""

    null = "0.0"
    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


BF16 = BFloat()


def declare(module: ir.Module, name: str, result: ir.Type, *args: ir.Type) -> ir.Function:
    """The function `name` of `module`, declared at its first use."""
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, args), name)


class Vectors:
    """Emits float32 vector code of `lanes` lanes at the place of `builder`.

    native_bf16: whether the two bf16 instructions may be used; else shifts and multiply-adds stand
    in for them (slowly, but anywhere).
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int, native_bf16: bool = True):
        self.b, self.lanes, self.native_bf16 = builder, lanes, native_bf16
        self.type = ir.VectorType(F32, lanes)
        self.ints = ir.VectorType(I32, lanes)

    # Addresses and memory

    def at(self, base: ir.Value, offset: "ir.Value | int") -> ir.Value:
        """`base` plus `offset` bytes."""
        if isinstance(offset, int):
            offset = I64(offset)
        return self.b.gep(base, [offset], source_etype=I8)

    def load(
        self, base: ir.Value, offset: "ir.Value | int", kind: ir.Type | None = None, align: int = 4
    ) -> ir.Value:
        return self.b.load(self.at(base, offset), typ=kind or self.type, align=align)

    def store(self, value: ir.Value, base: ir.Value, offset: "ir.Value | int") -> None:
        self.b.store(value, self.at(base, offset), align=4)

    def prefetch(self, base: ir.Value, offset: "ir.Value | int", locality: int) -> None:
        """Ask for the line; locality 3 is the first-level cache, 2 the second."""
        function = declare(self.b.module, "llvm.prefetch.p0", VOID, POINTER, I32, I32, I32)
        self.b.call(function, [self.at(base, offset), I32(0), I32(locality), I32(1)])

    @contextmanager
    def loop(self, count: int) -> Iterator[ir.Value]:
        """A loop whose body is emitted once; yields its int64 counter."""
        b, head = self.b, self.b.block
        body = b.append_basic_block("loop")
        b.branch(body)
        b.position_at_end(body)
        counter = b.phi(I64)
        counter.add_incoming(I64(0), head)
        yield counter
        step = b.add(counter, I64(1))
        counter.add_incoming(step, b.block)
        after = b.append_basic_block("after")
        b.cbranch(b.icmp_signed("<", step, I64(count)), body, after)
        b.position_at_end(after)

    # Values

    def constant(self, value: float) -> ir.Constant:
        return ir.Constant(self.type, [float(value)] * self.lanes)

    def int_constant(self, values: "int | Sequence[int]") -> ir.Constant:
        values = [values] * self.lanes if isinstance(values, int) else list(values)
        return ir.Constant(self.ints, values)

    def shuffle(self, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return self.b.shuffle_vector(a, b, mask)

    def splat(self, scalar: ir.Value, lanes: int | None = None) -> ir.Value:
        """Every lane the same scalar."""
        lanes = lanes or self.lanes
        kind = ir.VectorType(scalar.type, lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.shuffle(one, ir.Constant(kind, ir.Undefined), [0] * lanes)

    def broadcast(self, base: ir.Value, offset: "ir.Value | int") -> ir.Value:
        """The float32 at an address, in every lane."""
        return self.splat(self.load(base, offset, F32))

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.b.fadd(a, b, flags=_FAST)

    def sub(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.b.fsub(a, b, flags=_FAST)

    def mul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.b.fmul(a, b, flags=_FAST)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c, in one instruction where the ISA has it."""
        return self._intrinsic("llvm.fmuladd", a, b, c)

    def max(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def exp2(self, x: ir.Value) -> ir.Value:
        """2^x for x <= 0, relative error below 2^-22; anything below -120 gives 2^-120."""
        x = self.max(x, self.constant(-120.0))
        whole = self._intrinsic("llvm.rint", x)
        part = self.sub(x, whole)
        y = self.constant(_EXP2[0])
        for coefficient in _EXP2[1:]:
            y = self.fma(y, part, self.constant(coefficient))
        exponent = self.b.shl(self.b.fptosi(whole, self.ints), self.int_constant(23))
        return self.b.bitcast(self.b.add(self.b.bitcast(y, self.ints), exponent), self.type)

    def fold(
        self, x: ir.Value, period: int, combine: Callable[[ir.Value, ir.Value], ir.Value]
    ) -> ir.Value:
        """Combine lanes equal modulo `period` (a power of two); all of them get the result."""
        distance = self.lanes // 2
        while distance >= period:
            turned = [(lane + distance) % self.lanes for lane in range(self.lanes)]
            x = combine(x, self.shuffle(x, x, turned))
            distance //= 2
        return x

    def sums(self, vectors: Sequence[ir.Value]) -> ir.Value:
        """The vector whose lane i is the sum of the lanes of vectors[i]; as many vectors as
        lanes.
        """
        width, current = 1, list(vectors)
        while len(current) > 1:
            low, high = _interleaving(self.lanes, width)
            current = [
                self.add(self.shuffle(a, b, low), self.shuffle(a, b, high))
                for a, b in zip(current[::2], current[1::2], strict=True)
            ]
            width *= 2
        return current[0]

    # bf16, for 16 lanes

    def dot_pairs(self, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """total plus, in each lane, the dot product of two neighbouring bf16 of a and b (<16 x
        i32>).
        """
        if self.native_bf16:
            kind = ir.VectorType(BF16, 32)
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            function = declare(self.b.module, name, self.type, self.type, kind, kind)
            return self.b.call(function, [total, self.b.bitcast(a, kind), self.b.bitcast(b, kind)])
        (a0, a1), (b0, b1) = self.widen_pairs(a), self.widen_pairs(b)
        return self.fma(a1, b1, self.fma(a0, b0, total))

    def widen_pairs(self, raw: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The lower and the upper bf16 of each 32-bit lane as float32."""
        even = self.b.shl(raw, self.int_constant(16))
        odd = self.b.and_(raw, self.int_constant(-65536))
        return self.b.bitcast(even, self.type), self.b.bitcast(odd, self.type)

    def widen(self, raw: ir.Value) -> ir.Value:
        """bf16 bits (<lanes x i16>) to float32."""
        wide = self.b.shl(self.b.zext(raw, self.ints), self.int_constant(16))
        return self.b.bitcast(wide, self.type)

    def narrow(self, x: ir.Value) -> ir.Value:
        """float32 to bf16 bits (<lanes x i16>), round to nearest even."""
        b, kind = self.b, ir.VectorType(I16, self.lanes)
        if self.native_bf16:
            half = ir.VectorType(BF16, self.lanes)
            name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
            return b.bitcast(b.call(declare(b.module, name, half, self.type), [x]), kind)
        bits = b.bitcast(x, self.ints)
        odd = b.and_(b.lshr(bits, self.int_constant(16)), self.int_constant(1))
        rounded = b.add(bits, b.add(odd, self.int_constant(0x7FFF)))
        return b.trunc(b.lshr(rounded, self.int_constant(16)), kind)

    def _intrinsic(self, name: str, *args: ir.Value) -> ir.Value:
        full = f"{name}.v{self.lanes}f32"
        function = declare(self.b.module, full, self.type, *(a.type for a in args))
        return self.b.call(function, list(args))


def _interleaving(lanes: int, width: int) -> tuple[list[int], list[int]]:
    """Two shuffles of (a, b) whose sum halves the lanes of both: unpacking within 128 bits, then
    halves.
    """
    if width <= 2:  # 128-bit unpack of items of `width` floats
        four = [first + i for i in range(2) for first in (0, lanes)]  # a0 b0 a1 b1
        if width == 2:
            four = [first + i for first in (0, lanes) for i in range(2)]  # a0 a1 b0 b1
        low = [base + lane for base in range(0, lanes, 4) for lane in four]
        return low, [lane + 2 for lane in low]
    low, high = [], []
    for lane in range(lanes):
        from_a = lane // width % 2 == 0
        low.append(lane if from_a else lane + lanes)
        high.append(lane + width if from_a else lane + lanes - width)
    return low, high


# Minimax polynomial of 2^x on [-1/2, 1/2], highest power first.
_EXP2 = (0.00132764718, 0.00967554133, 0.0555071327, 0.240221197, 0.693146967, 1.00000007)
