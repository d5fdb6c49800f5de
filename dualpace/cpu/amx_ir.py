# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""AMX tiles as vector code: the inner loop of the tile GEMM and its epilogues.

A tile is 16 rows of 64 bytes. Activations lie as tiles of 16 rows x 32 bf16; weights as tiles of 16
pairs of inputs x 16 outputs, two of which (32 outputs) are neighbours; sums as tiles of 16 x 16
float32. `native=False` replaces the unit by loops over memory, for tests on CPUs without it.
This file knows nothing about threads or matrices larger than these pieces.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llvmlite import ir

from dualpace.cpu.vector_ir import I8, I16, I32, I64, POINTER, VOID, Vectors, declare

TILE = 1024  # bytes
ROWS = 16
PLAIN, ADD, SILU_MUL, ROPE = range(4)  # epilogues
WHOLE = ((ROWS, 64),) * 8
_LOG2E = 1.4426950408889634


class Tiles:
    """Tile registers 0 to 7 at the place of a builder; sizes: rows and bytes a row of each."""

    def __init__(
        self, builder: ir.IRBuilder, native: bool, sizes: Sequence[tuple[int, int]] = WHOLE
    ):
        self.b, self.native, self.sizes = builder, native, sizes
        self.x = Vectors(builder, 16, native)
        if not native:
            kind = ir.ArrayType(I8, TILE)
            with builder.goto_entry_block():
                places = [builder.ptrtoint(builder.alloca(kind), I64) for _ in range(8)]
                self.memory = [builder.inttoptr(place, POINTER) for place in places]

    def zero(self, tile: int) -> None:
        if self.native:
            self._call("tilezero", tile)
        else:
            self._copy(tile, None, 0, self.memory[tile], 64)

    def load(self, tile: int, address: ir.Value, stride: int = 64) -> None:
        if self.native:
            self._call("tileloadd64", tile, address, I64(stride))
        else:
            self._copy(tile, address, stride, self.memory[tile], 64)

    def store(self, tile: int, address: ir.Value, stride: int = 64) -> None:
        if self.native:
            self._call("tilestored64", tile, address, I64(stride))
        else:
            self._copy(tile, self.memory[tile], 64, address, stride)

    def multiply(self, sums: int, left: int, right: int) -> None:
        """sums += left x right, by pairs of bf16."""
        if self.native:
            self._call("tdpbf16ps", sums, left, right)
            return
        module = self.b.module
        product = module.globals.get("tile_product") or _stand_in(module)
        self.b.call(product, [self.memory[tile] for tile in (sums, left, right)])

    def _copy(
        self, tile: int, source: ir.Value | None, step: int, target: ir.Value, to_step: int
    ) -> None:
        rows, size = self.sizes[tile]
        kind = ir.VectorType(I32, size // 4)
        with self.x.loop(rows) as row:
            value = ir.Constant(kind, [0] * (size // 4))
            if source is not None:
                value = self.x.load(source, self.b.mul(row, I64(step)), kind)
            self.x.store(value, target, self.b.mul(row, I64(to_step)))

    def _call(self, name: str, *args) -> None:
        values = [I8(a) if isinstance(a, int) else a for a in args]
        kinds = [a.type for a in values]
        self.b.call(declare(self.b.module, f"llvm.x86.{name}", VOID, *kinds), values)


def _stand_in(module: ir.Module) -> ir.Function:
    """`void tile_product(sums, left, right)`: the unit's product for tiles in memory."""
    kind = ir.FunctionType(VOID, [POINTER] * 3)
    function = ir.Function(module, kind, "tile_product")
    function.linkage = "internal"
    function.attributes.add("noinline")
    sums, left, right = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x = Vectors(builder, 16, False)
    with x.loop(ROWS) as row:
        at = builder.mul(row, I64(64))
        total = x.load(sums, at)
        for pair in range(16):
            one = x.load(left, builder.add(at, I64(4 * pair)), I32)
            total = x.dot_pairs(total, x.splat(one), x.load(right, 64 * pair, x.ints))
        x.store(total, sums, at)
    builder.ret_void()
    return function


def configure(builder: ir.IRBuilder, config: ir.Value, native: bool) -> None:
    """Set the tile registers of this thread up as the 64 bytes at `config` say."""
    if native:
        builder.call(declare(builder.module, "llvm.x86.ldtilecfg", VOID, POINTER), [config])


def release(builder: ir.IRBuilder, native: bool) -> None:
    """Give this thread's tile registers back."""
    if native:
        builder.call(declare(builder.module, "llvm.x86.tilerelease", VOID), [])


@dataclass(frozen=True)
class Shape:
    """How the tile registers are used: `rows` x `columns` tiles of sums, `columns` of weights, and
    one that all activations pass through. No rows: no tile registers (VECTORS).

    One, since two or four were slower: a core whose other hyperthread is busy seems to have no
    registers left to rename loaded tiles to, and then a load into a register that has just been
    read costs less than one into a register that was read a while ago (docs/cpu.md).
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        assert self.columns in (1, 2) and self.rows * self.columns + self.columns + 1 <= 8


VECTORS = Shape(0, 2)  # none of them: vector_gemm_ir


def tile_function(module: ir.Module, shape: Shape, native: bool) -> ir.Function:
    """`void f(int64 count, a, int64 a_stride, b, c, int64 steps, int64 go_on, ahead, int64 lines)`.

    c, `count` rows of tiles of float32 (1 to shape.rows) in a matrix two tiles wide, is set to, or
    with `go_on` increased by, the product of `steps` tiles from each of `count` rows
    of tiles at a, `a_stride` bytes apart, and as many from b, which is two tiles wide as well. A
    shape of one column does one of the two. Each step asks the second-level cache for the next
    `lines` lines at `ahead`.
    """
    args = [I64, POINTER, I64, POINTER, POINTER, I64, I64, POINTER, I64]
    name = f"tiles_{shape.rows}_{shape.columns}_{int(native)}"
    function = ir.Function(module, ir.FunctionType(VOID, args), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    unreachable = function.append_basic_block("unreachable")
    choice = builder.switch(function.args[0], unreachable)
    for count in range(1, shape.rows + 1):
        block = function.append_basic_block(f"rows_{count}")
        choice.add_case(I64(count), block)
        builder.position_at_end(block)
        _Product(builder, shape, count, native, function.args[1:]).emit()
        builder.ret_void()
    builder.position_at_end(unreachable)
    builder.unreachable()
    return function


class _Product:
    """The body of tile_function for one number of rows of tiles."""

    def __init__(
        self, builder: ir.IRBuilder, shape: Shape, count: int, native: bool, args: list[ir.Value]
    ):
        self.a, self.a_stride, self.b, self.c, self.steps, self.go_on, self.ahead, self.lines = args
        self.builder, self.shape, self.count = builder, shape, count
        self.tiles = Tiles(builder, native)
        self.x = self.tiles.x
        columns = range(shape.columns)
        self.sums = [(r, h) for r in range(count) for h in columns]
        self.rights = [shape.rows * shape.columns + h for h in columns]
        self.left = self.rights[-1] + 1

    def emit(self) -> None:
        builder, tiles = self.builder, self.tiles
        with builder.if_else(builder.icmp_signed("!=", self.go_on, I64(0))) as (then, otherwise):
            with then:
                for sums in self.sums:
                    tiles.load(self._sums(*sums), self._place(*sums))
            with otherwise:
                for sums in self.sums:
                    tiles.zero(self._sums(*sums))
        with _counted(builder, self.steps) as step:
            self._step(step)
            self._prefetch(step)
        for sums in self.sums:
            tiles.store(self._sums(*sums), self._place(*sums))

    def _sums(self, row: int, column: int) -> int:
        return row * self.shape.columns + column

    def _place(self, row: int, column: int) -> ir.Value:
        return self.x.at(self.c, (2 * row + column) * TILE)

    def _step(self, step: ir.Value) -> None:
        for row in range(self.count):
            if row == 0:
                self._load_right(0, step)
            self._load_left(row, step)
            for column in range(self.shape.columns):
                if row == 0 and column:
                    self._load_right(column, step)
                self._multiply(row, column)

    def _multiply(self, row: int, column: int) -> None:
        self.tiles.multiply(self._sums(row, column), self.left, self.rights[column])

    def _load_left(self, row: int, step: ir.Value) -> None:
        at = self.x.at(self.a, self.builder.mul(step, I64(TILE)))
        if row:
            at = self.x.at(at, self.builder.mul(self.a_stride, I64(row)))
        self.tiles.load(self.left, at)

    def _load_right(self, column: int, step: ir.Value) -> None:
        at = self.x.at(self.b, self.builder.mul(step, I64(2 * TILE)))
        self.tiles.load(self.rights[column], self.x.at(at, column * TILE))

    def _prefetch(self, step: ir.Value) -> None:
        builder, x = self.builder, self.x
        line = x.at(self.ahead, builder.mul(builder.mul(step, self.lines), I64(64)))
        with _counted(builder, self.lines) as i:
            x.prefetch(line, builder.mul(i, I64(64)), 2)


def epilogue_function(module: ir.Module, kind: int, native: bool) -> ir.Function:
    """`void f(c, int64 rows, out, int64 out_stride, other, int64 other_stride)` in `module`.

    Turns a pair of tiles into `rows` rows of bf16 at `out` (strides in bytes). PLAIN: 32 columns.
    ADD: the same plus 32 columns of bf16 at `other`. SILU_MUL: 16 columns silu(first) * second.
    """
    args = [POINTER, I64, POINTER, I64, POINTER, I64]
    name = f"tiles_end_{kind}_{int(native)}"
    function = ir.Function(module, ir.FunctionType(VOID, args), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    c, rows, out, out_stride, other, other_stride = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x = Vectors(builder, 16, native)
    half = ir.VectorType(I16, 16)

    def put(value: ir.Value, column: int) -> None:
        builder.store(x.narrow(value), x.at(target, 2 * column), align=2)

    with _counted(builder, rows) as row:
        source = x.at(c, builder.mul(row, I64(64)))
        target = x.at(out, builder.mul(row, out_stride))
        first, second = x.load(source, 0), x.load(source, TILE)
        if kind == SILU_MUL:
            put(x.mul(x.mul(first, _sigmoid(x, first)), second), 0)
        for column, value in ((0, first), (16, second)) if kind != SILU_MUL else ():
            if kind == ADD:
                beside = x.at(other, builder.mul(row, other_stride))
                value = x.add(value, x.widen(x.load(beside, 2 * column, half, 2)))
            put(value, column)
    builder.ret_void()
    return function


def _sigmoid(x: Vectors, value: ir.Value) -> ir.Value:
    """1 / (1 + e^-value), without overflow: from e^-|value| either way."""
    size = x.max(value, x.sub(x.constant(0.0), value))
    small = x.exp2(x.mul(size, x.constant(-_LOG2E)))
    positive = x.b.fcmp_ordered(">=", value, x.constant(0.0))
    top = x.b.select(positive, x.constant(1.0), small)
    return x.b.fdiv(top, x.add(x.constant(1.0), small))


@contextmanager
def _counted(builder: ir.IRBuilder, count: ir.Value):
    """A loop of a count known when running, perhaps 0; yields its counter."""
    before = builder.block
    head = builder.append_basic_block("head")
    body = builder.append_basic_block("body")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    counter = builder.phi(I64)
    counter.add_incoming(I64(0), before)
    builder.cbranch(builder.icmp_signed("<", counter, count), body, after)
    builder.position_at_end(body)
    yield counter
    counter.add_incoming(builder.add(counter, I64(1)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)
