# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""Attention over one KV block of 16 tokens, for all query heads of one KV head, as vector code.

K and V rows are read once for the whole group. bf16 is widened in registers: of 2 * lanes
neighbours the even ones by a shift and the odd ones by a mask, so accumulators and queries lie in
that order too. With `dot` the ISA multiplies bf16 pairs itself. Scores of the 16 tokens stand
token by token, the heads of the group side by side (padded to a power of two), so that softmax
runs over full vectors for all heads together. This file knows nothing about threads, plans or
Numba.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from dualpace.block import BLOCK_TOKENS
from dualpace.cpu.vector_ir import F32, I16, I32, I64, POINTER, VOID, Vectors

LOWEST = -1e30  # below any score, and finite: differences of two of them stay numbers


@dataclass(frozen=True)
class BlockShape:
    """One specialisation, and where things lie in its buffers.

    head_dim  a multiple of 16
    group     query heads a KV head, 1 to 16
    lanes     8 or 16 float32 a vector
    bf16      dtype of K, V and q; else float32
    dot       multiply bf16 pairs (bf16 and 16 lanes only)
    native    with the ISA's instruction for that; else with a stand-in that runs anywhere (tests)
    tiles     on the tile unit (tile_block_ir; bf16, 16 lanes, head sizes that are multiples of 32,
              groups up to 8)
    """

    head_dim: int
    group: int
    lanes: int
    bf16: bool
    dot: bool = False
    native: bool = True
    tiles: bool = False

    @property
    def item(self) -> int:
        """Bytes of an element of K and V."""
        return 2 if self.bf16 else 4

    @property
    def row(self) -> int:
        """Bytes of a row of K or V."""
        return self.head_dim * self.item

    @property
    def query_row(self) -> int:
        """Bytes of a prepared query: float32 in `place` order, or bf16 padded to whole vectors."""
        return -(-self.head_dim // 32) * 64 if self.dot else self.head_dim * 4

    @property
    def query_bytes(self) -> int:
        """Bytes of the prepared queries of a group: a row a head, or, with `tiles`, pairs of
        elements, the heads side by side.
        """
        return self.head_dim // 2 * self.pad * 4 if self.tiles else self.group * self.query_row

    @property
    def parts(self) -> int:
        """The group is processed in this many parts of at most `lanes` heads."""
        return -(-self.group // self.lanes)

    @property
    def per_part(self) -> int:
        return -(-self.group // self.parts)

    @property
    def pad(self) -> int:
        """Lanes that the heads of a part take: a power of two. Pairs of tokens need two vectors."""
        return 2 if self.dot and self.per_part == 1 else 1 << (self.per_part - 1).bit_length()

    @property
    def tile(self) -> int:
        """Tokens whose scores fill one vector."""
        return self.lanes // self.pad

    @property
    def state_floats(self) -> int:
        """float32 of the running state: accumulators [group, d] in `place` order, then maxima,
        then sums, both [parts, lanes] with each head's value in every lane that is its own modulo
        `pad`."""
        return self.group * self.head_dim + 2 * self.parts * self.lanes

    @property
    def work_floats(self) -> int:
        """float32 of working memory for one block: weights, shrink factors, bf16 pairs."""
        if self.tiles:
            pairs = 2 * self.group * BLOCK_TOKENS
        else:
            pairs = BLOCK_TOKENS // 2 * self.pad if self.dot else 0
        return BLOCK_TOKENS * self.pad + self.lanes + pairs

    def lane(self, head: int) -> int:
        """Index of a head's maximum (or sum) among the maxima."""
        return head // self.per_part * self.lanes + head % self.per_part

    def place(self) -> list[int]:
        """Position of each element of a row within an accumulator."""
        if self.tiles:  # the even ones, then the odd ones
            return [i % 2 * self.head_dim // 2 + i // 2 for i in range(self.head_dim)]
        order = [0] * self.head_dim
        for start, count in self.chunks():
            for i in range(count):
                order[start + i] = start + self._within(i, count)
        return order

    def _within(self, i: int, count: int) -> int:
        if not self.bf16 or count < 2 * self.lanes:
            return i
        if self.dot:  # unpacking interleaves within 128 bits: 4 pairs low, 4 pairs high, and so on
            return i // 4 % 2 * 16 + i // 8 * 4 + i % 4
        return i % 2 * self.lanes + i // 2

    def chunks(self) -> list[tuple[int, int]]:
        """(first element, elements) of the pieces of a row that one step takes."""
        step = 2 * self.lanes if self.bf16 else self.lanes
        return [(i, min(step, self.head_dim - i)) for i in range(0, self.head_dim, step)]


def block_function(module: ir.Module, shape: BlockShape, locality: int = 2) -> ir.Function:
    """The function `void f(q, k, v, state, work, int64 tokens, float scale, next_k, next_v)` in
    `module`.

    It folds the first `tokens` rows of the block at k, v into `state`, with scores q.k * scale as
    powers of two, and asks the cache (`locality`, see Vectors.prefetch) for the block at next_k,
    next_v meanwhile.
    """
    name = f"attend_{shape.head_dim}_{shape.group}_{shape.lanes}_{shape.item}_{int(shape.dot)}"
    function = declare_block(module, name)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    Block(builder, shape, function.args, locality).emit()
    builder.ret_void()
    return function


def declare_block(module: ir.Module, name: str) -> ir.Function:
    """A function of block_function's type without a body."""
    args = [POINTER] * 5 + [I64, F32, POINTER, POINTER]
    function = ir.Function(module, ir.FunctionType(VOID, args), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    return function


class Block:
    """The body of block_function, emitted at the place of a builder."""

    def __init__(
        self, builder: ir.IRBuilder, shape: BlockShape, args: list[ir.Value], locality: int
    ):
        self.x, self.b, self.s, self.locality = (
            Vectors(builder, shape.lanes, shape.native),
            builder,
            shape,
            locality,
        )
        self.q, self.k, self.v, self.state, self.work, tokens, scale, self.next_k, self.next_v = (
            args
        )
        self.scale = self.x.splat(scale)
        self.tokens = self.x.splat(builder.trunc(tokens, I32))
        self.shrink_at = BLOCK_TOKENS * shape.pad * 4
        self.pairs_at = self.shrink_at + shape.lanes * 4

    def emit(self) -> None:
        for part in range(self.s.parts):
            first = part * self.s.per_part
            heads = list(range(first, min(first + self.s.per_part, self.s.group)))
            self._scores(heads, prefetch=part == 0)
            self._softmax(part)
            # Two accumulators a head and the widened values must fit the registers.
            at_once = 5 if self.s.lanes == 8 else 8
            pieces = -(-len(heads) // at_once)
            size = -(-len(heads) // pieces)
            for i in range(0, len(heads), size):
                self._values(heads[i : i + size], first, prefetch=part == i == 0)

    # Scores: work[token, head] = q[head] . k[token] * scale

    def _scores(self, heads: list[int], prefetch: bool) -> None:
        x, s = self.x, self.s
        tile_bytes = s.tile * s.row
        with x.loop(BLOCK_TOKENS // s.tile) as i:
            k = x.at(self.k, self.b.mul(i, I64(tile_bytes)))
            dots = [[x.constant(0.0)] * s.pad for _ in range(s.tile)]
            for start, count in s.chunks():
                keys = [self._load(k, t * s.row + start * s.item, count) for t in range(s.tile)]
                for piece in range(len(keys[0])):
                    for lane, head in enumerate(heads):
                        query = self._query(head, start, count, piece)
                        for t in range(s.tile):
                            dots[t][lane] = self._dot(keys[t][piece], query, dots[t][lane], count)
            if prefetch:
                self._prefetch(self.next_k, i, tile_bytes)
            scores = x.mul(x.sums([dot for row in dots for dot in row]), self.scale)
            x.store(scores, self.work, self.b.mul(i, I64(s.lanes * 4)))

    def _query(self, head: int, start: int, count: int, piece: int) -> ir.Value:
        x, s = self.x, self.s
        if s.dot:
            return x.load(self.q, head * s.query_row + start * 2, x.ints, 2)
        return x.load(self.q, head * s.query_row + (start + piece * s.lanes) * 4)

    def _dot(self, key: ir.Value, query: ir.Value, total: ir.Value, count: int) -> ir.Value:
        return self.x.dot_pairs(total, key, query) if self.s.dot else self.x.fma(key, query, total)

    def _load(self, base: ir.Value, offset: int, count: int) -> list[ir.Value]:
        """A chunk of K or V in float32 vectors, in `place` order; with `dot`, of K, as it lies,
        in one of bf16.
        """
        x, s = self.x, self.s
        if not s.bf16:
            return [x.load(base, offset)]
        if s.dot:
            raw = x.load(base, offset, ir.VectorType(I16, count), 2)
            if count < 32:
                zero = ir.Constant(raw.type, [0] * count)
                raw = x.shuffle(raw, zero, list(range(32)))
            return [self.b.bitcast(raw, x.ints)]
        if count < 2 * s.lanes:  # 16 values left over for 16 lanes
            raw = x.load(base, offset, ir.VectorType(I16, count), 2)
            return [x.widen(raw)]
        return list(x.widen_pairs(x.load(base, offset, x.ints, 2)))

    def _score(self, i: int) -> ir.Value:
        return self.x.load(self.work, i * self.s.lanes * 4)

    # Softmax: work[token, head] = 2^(score - maximum), state maxima and sums, shrink[head]

    def _softmax(self, part: int) -> None:
        x, s, b = self.x, self.s, self.b
        top_at = (s.group * s.head_dim + part * s.lanes) * 4
        sum_at = top_at + s.parts * s.lanes * 4
        scores, masks = [], []
        for i in range(BLOCK_TOKENS // s.tile):
            token = x.int_constant([i * s.tile + lane // s.pad for lane in range(s.lanes)])
            masks.append(b.icmp_signed("<", token, self.tokens))
            scores.append(b.select(masks[i], self._score(i), x.constant(LOWEST)))
        old = x.load(self.state, top_at)
        top = x.max(old, x.fold(_tree(scores, x.max), s.pad, x.max))
        shrink = x.exp2(x.sub(old, top))
        weights = [
            b.select(mask, x.exp2(x.sub(score, top)), x.constant(0.0))
            for score, mask in zip(scores, masks, strict=True)
        ]
        total = x.fold(_tree(weights, x.add), s.pad, x.add)
        x.store(top, self.state, top_at)
        x.store(x.fma(x.load(self.state, sum_at), shrink, total), self.state, sum_at)
        x.store(shrink, self.work, self.shrink_at)
        self._keep(weights)

    def _keep(self, weights: list[ir.Value]) -> None:
        """Store the weights for `_values`."""
        if self.s.dot:
            self._store_pairs(weights)
            return
        for i, weight in enumerate(weights):
            self.x.store(weight, self.work, i * self.s.lanes * 4)

    def _store_pairs(self, weights: list[ir.Value]) -> None:
        """Weights as bf16, those of tokens 2j and 2j + 1 side by side for every head: int32 [8,
        pad].
        """
        x, s = self.x, self.s
        narrow = [x.narrow(weight) for weight in weights]
        for i in range(0, len(narrow), 2):
            lanes = []
            for j in range(s.tile):  # pairs of tokens within two vectors
                for head in range(s.pad):
                    lanes += [(2 * j + t) * s.pad + head for t in range(2)]
            x.store(x.shuffle(narrow[i], narrow[i + 1], lanes), self.work, self.pairs_at + i * 32)

    # Values: state[head] = state[head] * shrink + sum of work[token, head] * v[token]

    def _values(self, heads: list[int], first: int, prefetch: bool) -> None:
        chunks = self.s.chunks()
        whole = [chunk for chunk in chunks if chunk[1] == chunks[0][1]]
        together = max(1, (8 if self.s.lanes == 8 else 16) // (2 * len(heads)))
        together = next(n for n in range(min(together, len(whole)), 0, -1) if len(whole) % n == 0)
        step = chunks[0][1] * together
        rounds = len(whole) // together
        with self.x.loop(rounds) as i:
            self._value_chunks(heads, first, whole[:together], self.b.mul(i, I64(step)))
            if prefetch:
                self._prefetch(self.next_v, i, BLOCK_TOKENS * self.s.row // rounds)
        if len(whole) < len(chunks):
            self._value_chunks(heads, first, chunks[len(whole) :], I64(0))

    def _value_chunks(
        self, heads: list[int], first: int, chunks: list[tuple[int, int]], element: ir.Value
    ) -> None:
        """Accumulate `chunks`, moved on by `element` elements."""
        x, s = self.x, self.s
        v = x.at(self.v, self.b.mul(element, I64(s.item)))
        state = x.at(self.state, self.b.mul(element, I64(4)))
        shrink = {h: x.broadcast(self.work, self.shrink_at + (h - first) * 4) for h in heads}
        sums = {}
        for h in heads:
            for at in self._vectors(chunks):
                old = x.load(state, (h * s.head_dim + at) * 4)
                sums[h, at] = x.mul(old, shrink[h])
        for t in range(0, BLOCK_TOKENS, 2 if s.dot else 1):
            weights = {h: self._weight(t, h - first) for h in heads}
            for start, count in chunks:
                values = self._pair(v, t, start, count) if s.dot else self._row(v, t, start, count)
                for piece, value in enumerate(values):
                    at = start + piece * s.lanes
                    for h in heads:
                        if s.dot:
                            sums[h, at] = x.dot_pairs(sums[h, at], value, weights[h])
                        else:
                            sums[h, at] = x.fma(value, weights[h], sums[h, at])
        for (h, at), value in sums.items():
            x.store(value, state, (h * s.head_dim + at) * 4)

    def _vectors(self, chunks: list[tuple[int, int]]) -> list[int]:
        return [at for start, n in chunks for at in range(start, start + n, self.s.lanes)]

    def _weight(self, token: int, lane: int) -> ir.Value:
        x, s = self.x, self.s
        if not s.dot:
            return x.broadcast(self.work, (token * s.pad + lane) * 4)
        pair = x.load(self.work, self.pairs_at + (token // 2 * s.pad + lane) * 4, I32)
        return x.splat(pair)

    def _row(self, v: ir.Value, token: int, start: int, count: int) -> list[ir.Value]:
        return self._load(v, token * self.s.row + start * self.s.item, count)

    def _pair(self, v: ir.Value, token: int, start: int, count: int) -> list[ir.Value]:
        """Rows `token` and `token + 1` with their elements alternating, in `place` order."""
        x, s = self.x, self.s
        kind = ir.VectorType(I16, count)
        a = x.load(v, token * s.row + start * 2, kind, 2)
        b = x.load(v, (token + 1) * s.row + start * 2, kind, 2)
        place = [s._within(i, count) for i in range(count)]
        lanes = [0] * (2 * count)
        for i, at in enumerate(place):
            lanes[2 * at], lanes[2 * at + 1] = i, count + i
        halves = [x.shuffle(a, b, lanes[i : i + 32]) for i in range(0, 2 * count, 32)]
        return [self.b.bitcast(half, x.ints) for half in halves]

    def _prefetch(self, base: ir.Value, i: ir.Value, size: int) -> None:
        """Ask for piece i of `size` bytes."""
        start = self.x.at(base, self.b.mul(i, I64(size)))
        for line in range(0, size, 64):
            self.x.prefetch(start, line, self.locality)


def _tree(values: list[ir.Value], combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Pairwise reduction: independent operations side by side."""
    while len(values) > 1:
        odd = values[len(values) // 2 * 2 :]
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [combine(a, b) for a, b in pairs] + odd
    return values[0]
