# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""The inner product of a few rows with rows of a weight, as float32 vectors.

As many sums as a vector has lanes grow at once, each a vector of its own: enough to cover the
latency of multiply-adds, few enough for the registers, and at the end one vector holds them all.
This file knows nothing about threads or tensors.
"""

from llvmlite import ir

from dualpace.cpu.vector_ir import F32, I1, I32, I64, POINTER, VOID, Vectors, declare

ROWS = (1, 2, 4)  # of activations, at once


def rows_function(module: ir.Module, lanes: int) -> ir.Function:
    """`void f(int64 rows, x, weight, bias, out, int64 inputs, int64 x_stride, int64 weight_stride,
    int64 out_stride, int64 more_rows, int64 more_outputs)` in `module`.

    `rows` (one of ROWS) rows of x by lanes / rows outputs; strides in bytes. Rows and outputs
    behind the last (more_rows, more_outputs: how many there are) are the last once more.
    """
    args = [I64, *[POINTER] * 4, *[I64] * 6]
    function = ir.Function(module, ir.FunctionType(VOID, args), f"few_rows_{lanes}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    unreachable = function.append_basic_block("unreachable")
    choice = builder.switch(function.args[0], unreachable)
    for count in ROWS:
        block = function.append_basic_block(f"rows_{count}")
        choice.add_case(I64(count), block)
        builder.position_at_end(block)
        _product(Vectors(builder, lanes), count, *function.args[1:])
        builder.ret_void()
    builder.position_at_end(unreachable)
    builder.unreachable()
    return function


def _product(
    v: Vectors,
    count: int,
    x: ir.Value,
    weight: ir.Value,
    bias: ir.Value,
    out: ir.Value,
    inputs: ir.Value,
    x_stride: ir.Value,
    weight_stride: ir.Value,
    out_stride: ir.Value,
    more_rows: ir.Value,
    more_outputs: ir.Value,
) -> None:
    b = v.b
    rows = [_least(b, I64(row), b.sub(more_rows, I64(1))) for row in range(count)]
    last = b.sub(more_outputs, I64(1))
    outputs = [_least(b, I64(output), last) for output in range(v.lanes // count)]
    lefts = [v.at(x, b.mul(row, x_stride)) for row in rows]
    rights = [v.at(weight, b.mul(output, weight_stride)) for output in outputs]
    zero = v.constant(0.0)

    # Fewer outputs are fewer streams than the processor follows by itself: the next ones' weights
    # are asked for, where they lie behind these.
    ahead = v.at(weight, b.mul(weight_stride, I64(len(outputs))))
    lines = len(outputs) * v.lanes * 4 // 64 if count == ROWS[-1] else 0

    def step(offset: ir.Value, sums: list[ir.Value], load) -> list[ir.Value]:
        for line in range(lines):
            v.prefetch(v.at(ahead, b.mul(offset, I64(len(outputs)))), 64 * line, 2)
        left = [load(row, offset) for row in lefts]
        right = [load(output, offset) for output in rights]
        pairs = [(one, other) for one in left for other in right]
        return [v.fma(*pair, total) for pair, total in zip(pairs, sums, strict=True)]

    whole = b.udiv(inputs, I64(v.lanes))
    sums = _counted(v, whole, [zero] * v.lanes, lambda i, s: step(_bytes(v, i), s, v.load))
    rest = b.sub(inputs, b.mul(whole, I64(v.lanes)))
    there = b.icmp_signed("<", v.int_constant(range(v.lanes)), v.splat(b.trunc(rest, I32)))

    def masked(base: ir.Value, offset: ir.Value) -> ir.Value:
        name = f"llvm.masked.load.v{v.lanes}f32.p0"
        kind = ir.VectorType(I1, v.lanes)
        function = declare(b.module, name, v.type, POINTER, I32, kind, v.type)
        return b.call(function, [v.at(base, offset), I32(4), there, zero])

    some = b.zext(b.icmp_signed(">", rest, I64(0)), I64)
    sums = _counted(v, some, sums, lambda _, s: step(_bytes(v, whole), s, masked))
    totals = v.sums(sums)
    places = [(row, output) for row in rows for output in outputs]
    for lane, (row, output) in enumerate(places):
        column = b.mul(output, I64(4))
        total = v.b.extract_element(totals, I32(lane))
        total = b.fadd(total, v.load(bias, column, F32))
        v.store(total, v.at(out, b.mul(row, out_stride)), column)


def _least(b: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed("<", one, other), one, other)


def _bytes(v: Vectors, vectors: ir.Value) -> ir.Value:
    return v.b.mul(vectors, I64(4 * v.lanes))


def _counted(v: Vectors, count: ir.Value, values: list[ir.Value], body) -> list[ir.Value]:
    """`values` after `body` has taken them on `count` times, perhaps never."""
    b, before = v.b, v.b.block
    head, inside, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    counter, *carried = [b.phi(value.type) for value in (count, *values)]
    b.cbranch(b.icmp_signed("<", counter, count), inside, after)
    b.position_at_end(inside)
    results = [b.add(counter, I64(1)), *body(counter, carried)]
    for phi, start, value in zip((counter, *carried), (I64(0), *values), results, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(after)
    return carried
