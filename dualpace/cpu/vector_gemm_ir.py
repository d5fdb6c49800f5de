# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""The tile GEMM's inner loop without a tile unit: the same product of the same tiles by vectors
that multiply bf16 pairs.

A row of a tile of weights is a vector already: one pair of inputs for 16 outputs. So 16 sums grow
by that row times one pair of activations, which all lanes share. This file knows nothing about
threads or matrices larger than these pieces.
"""

from collections.abc import Callable

from llvmlite import ir

from dualpace.cpu.amx_ir import TILE, _counted
from dualpace.cpu.vector_ir import I32, I64, POINTER, VOID, Vectors

PAIRS = 16  # of inputs, in a tile
# Rows at once: with two vectors of sums each, as many as cover the instruction's latency, and the
# registers hold them beside two vectors of weights.
ROWS_AT_ONCE = 8
_UNROLLED = 2  # pairs of inputs


def product_function(module: ir.Module, native: bool) -> ir.Function:
    """`void f(int64 rows, a, int64, b, c, int64 steps, int64 go_on, ahead, int64 lines)`.

    amx_ir.tile_function for one row of tiles at a and c, of which the first `rows` rows (1 to 16)
    are computed, and both columns of b.
    """
    args = [I64, POINTER, I64, POINTER, POINTER, I64, I64, POINTER, I64]
    function = ir.Function(module, ir.FunctionType(VOID, args), f"vectors_{int(native)}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    rows, a, _, b, c, steps, go_on, ahead, lines = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x = Vectors(builder, 16, native)
    done = function.append_basic_block("done")
    unreachable = function.append_basic_block("unreachable")
    # All whole blocks of rows but the last, then the last by its number of rows.
    blocks = builder.udiv(builder.sub(rows, I64(1)), I64(ROWS_AT_ONCE))
    with _counted(builder, blocks) as i:
        at = builder.mul(i, I64(ROWS_AT_ONCE * 64))
        none = I64(0)  # the last block asks for what comes next
        block = (x.at(a, at), b, x.at(c, at), steps, go_on, ahead, none)
        _Product(x, ROWS_AT_ONCE, *block).emit()
    first = builder.mul(blocks, I64(ROWS_AT_ONCE))
    at = builder.mul(first, I64(64))
    a, c = x.at(a, at), x.at(c, at)
    choice = builder.switch(builder.sub(rows, first), unreachable)
    for count in range(1, ROWS_AT_ONCE + 1):
        block = function.append_basic_block(f"rows_{count}")
        choice.add_case(I64(count), block)
        builder.position_at_end(block)
        _Product(x, count, a, b, c, steps, go_on, ahead, lines).emit()
        builder.branch(done)
    builder.position_at_end(unreachable)
    builder.unreachable()
    builder.position_at_end(done)
    builder.ret_void()
    return function


class _Product:
    """`count` rows of both columns, whose sums stay in registers for all steps."""

    def __init__(
        self,
        x: Vectors,
        count: int,
        a: ir.Value,
        b: ir.Value,
        c: ir.Value,
        steps: ir.Value,
        go_on: ir.Value,
        ahead: ir.Value,
        lines: ir.Value,
    ):
        self.x, self.builder, self.a, self.b = x, x.b, a, b
        self.steps, self.go_on, self.ahead, self.lines = steps, go_on, ahead, lines
        self.rows = range(count)
        self.places = [x.at(c, column * TILE + row * 64) for row in self.rows for column in (0, 1)]

    def emit(self) -> None:
        x, builder = self.x, self.builder
        is_first = builder.icmp_signed("==", self.go_on, I64(0))
        zero = x.constant(0.0)
        begun = [builder.select(is_first, zero, x.load(place, 0)) for place in self.places]
        for value, place in zip(
            self._loop(self.steps, begun, self._step), self.places, strict=True
        ):
            x.store(value, place, 0)

    def _step(self, step: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """The sums after one tile of inputs."""
        x, builder = self.x, self.builder
        line = x.at(self.ahead, builder.mul(builder.mul(step, self.lines), I64(64)))
        with _counted(builder, self.lines) as i:
            x.prefetch(line, builder.mul(i, I64(64)), 2)
        left = x.at(self.a, builder.mul(step, I64(TILE)))
        right = x.at(self.b, builder.mul(step, I64(2 * TILE)))

        def pairs(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            for pair in range(_UNROLLED):
                at = builder.add(builder.mul(i, I64(_UNROLLED)), I64(pair))
                activations = x.at(left, builder.mul(at, I64(4)))
                weights = x.at(right, builder.mul(at, I64(64)))
                columns = [x.load(weights, column * TILE, x.ints) for column in (0, 1)]
                both = [x.splat(x.load(activations, row * 64, I32)) for row in self.rows]
                factors = [(row, column) for row in both for column in columns]
                sums = [x.dot_pairs(s, *f) for s, f in zip(sums, factors, strict=True)]
            return sums

        return self._loop(I64(PAIRS // _UNROLLED), sums, pairs)

    def _loop(
        self,
        count: ir.Value,
        values: list[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
    ) -> list[ir.Value]:
        """`values` after `body` has taken them on `count` times, at least once."""
        builder, before = self.builder, self.builder.block
        head, after = (builder.append_basic_block(name) for name in ("on", "out"))
        builder.branch(head)
        builder.position_at_end(head)
        counter, *carried = [builder.phi(value.type) for value in (I64(0), *values)]
        results = body(counter, carried)
        more = builder.add(counter, I64(1))
        for phi, start, value in zip(
            (counter, *carried), (I64(0), *values), (more, *results), strict=True
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", more, count), head, after)
        builder.position_at_end(after)
        return results
