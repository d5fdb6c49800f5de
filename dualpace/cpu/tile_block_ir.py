# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""Attention over one KV block of 16 tokens on the tile unit: block_ir's function by tile products.

K lies as a left operand, 16 tokens by pairs of elements, so the queries are its right operand and
scores come out token by token. V lies as a right operand if a row is taken for 16 columns of pairs
(elements 2 n and 2 n + 1): the weights of a head become two rows of the left operand, one whose
pairs are (weight, 0) and sums the even elements, one whose pairs are (0, weight) and sums the odd
ones. So neither K nor V passes through vector registers. This file knows nothing about threads,
plans or Numba.
"""

from llvmlite import ir

from dualpace.cpu import amx_probe
from dualpace.cpu.amx_ir import ROWS, Tiles
from dualpace.cpu.block_ir import Block, BlockShape, declare_block

_SCORES, _KEYS, _QUERY, _WEIGHTS = 4, 5, 6, 7  # 0 to 3: accumulators; values share the keys' tile


def takes_tiles(head_dim: int, group: int) -> bool:
    """Whether the tile unit's function takes this head size and query heads a KV head."""
    return head_dim % 32 == 0 and group <= ROWS // 2


def tile_sizes(shape: BlockShape) -> list[tuple[int, int]]:
    """Rows, and bytes a row, of each tile register."""
    narrow, weights = (ROWS, 4 * shape.pad), (2 * shape.group, 64)
    return [weights] * 4 + [narrow, (ROWS, 64), narrow, weights]


def tile_config(shape: BlockShape) -> bytes:
    """`tile_sizes` as the 64 bytes that the unit is configured with."""
    return amx_probe.tile_config(tile_sizes(shape))


def tile_block_function(module: ir.Module, shape: BlockShape, locality: int = 3) -> ir.Function:
    """block_ir's function for a shape with `tiles`; the caller has configured `tile_sizes`."""
    assert shape.tiles and shape.bf16 and shape.lanes == 16
    assert takes_tiles(shape.head_dim, shape.group)
    function = declare_block(module, f"attend_tiles_{shape.head_dim}_{shape.group}")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _TileBlock(builder, shape, function.args, locality).emit()
    builder.ret_void()
    return function


class _TileBlock(Block):
    def emit(self) -> None:
        self.tiles = Tiles(self.b, self.s.native, tile_sizes(self.s))
        self._scores()
        self._softmax(0)
        self._shrink()
        self._values()

    def _scores(self) -> None:
        x, s, tiles = self.x, self.s, self.tiles
        tiles.zero(_SCORES)
        for start, _ in s.chunks():
            tiles.load(_KEYS, x.at(self.k, start * 2), s.row)
            tiles.load(_QUERY, x.at(self.q, start // 2 * s.pad * 4), s.pad * 4)
            tiles.multiply(_SCORES, _KEYS, _QUERY)
            self._ask(self.next_k, start)
        tiles.store(_SCORES, self.work, s.pad * 4)

    def _score(self, i: int) -> ir.Value:
        return self.x.mul(super()._score(i), self.scale)

    def _keep(self, weights: list[ir.Value]) -> None:
        x, b = self.x, self.b
        for head, row in enumerate(self._by_head(weights)[: self.s.group]):
            even = b.zext(x.narrow(row), x.ints)
            odd = b.shl(even, x.int_constant(16))
            for parity, value in enumerate((even, odd)):
                x.store(value, self.work, self.pairs_at + (2 * head + parity) * 64)

    def _by_head(self, rows: list[ir.Value]) -> list[ir.Value]:
        """Weights by token, the heads side by side, to one vector of 16 tokens a head."""
        heads = self.s.pad  # that a vector holds, for 16 / heads tokens
        groups = [rows]
        while heads > 1:
            halves = []
            for group in groups:
                for half in range(2):
                    merged = []
                    for a, c in zip(group[::2], group[1::2], strict=True):
                        tokens = 16 // heads
                        lanes = [
                            which * 16 + token * heads + half * heads // 2 + head
                            for which in range(2)
                            for token in range(tokens)
                            for head in range(heads // 2)
                        ]
                        merged.append(self.x.shuffle(a, c, lanes))
                    halves.append(merged)
            groups, heads = halves, heads // 2
        return [group[0] for group in groups]

    def _shrink(self) -> None:
        """Bring the accumulators to the new maxima where one has grown, which soon is rare."""
        x, s, b = self.x, self.s, self.b
        factors = x.load(self.work, self.shrink_at)
        changed = b.fcmp_unordered("!=", factors, x.constant(1.0))
        any_changed = b.icmp_unsigned("!=", b.bitcast(changed, ir.IntType(16)), ir.IntType(16)(0))
        with b.if_then(any_changed, likely=False):
            for head in range(s.group):
                factor = x.broadcast(self.work, self.shrink_at + head * 4)
                for at in range(head * s.head_dim * 4, (head + 1) * s.head_dim * 4, 64):
                    x.store(x.mul(x.load(self.state, at), factor), self.state, at)

    def _values(self) -> None:
        x, s, tiles = self.x, self.s, self.tiles
        tiles.load(_WEIGHTS, x.at(self.work, self.pairs_at))
        for i, (start, _) in enumerate(s.chunks()):
            sums, place = i % 4, x.at(self.state, start // 2 * 4)
            tiles.load(sums, place, s.row)
            tiles.load(_KEYS, x.at(self.v, start * 2), s.row)
            tiles.multiply(sums, _WEIGHTS, _KEYS)
            tiles.store(sums, place, s.row)
            self._ask(self.next_v, start)

    def _ask(self, base: ir.Value, start: int) -> None:
        """Ask for the part of the coming block that is as large as a chunk, in order."""
        first = start * 2 * ROWS
        for line in range(first, first + 64 * ROWS, 64):
            self.x.prefetch(base, line, self.locality)
