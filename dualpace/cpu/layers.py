"""The layers of a decode iteration as chains of kernels, where the dense stages run on tiles.

Seven kernels a layer: norm, QKV and attention; O, norm, gate and up, down. All layers are one chain
where all of them run here; where somebody else does the second part, the first is a chain by
itself. Everything in their argument blocks but what a round brings is filled in once a number of
rows. This file knows nothing about requests or who owns the blocks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dualpace.cpu import decode_kernel, norm_kernel
from dualpace.cpu.attention import PagedDecoder
from dualpace.cpu.chain import Chain, Step
from dualpace.cpu.dense_stage import PostAttention, Rooms
from dualpace.cpu.gemm import MAX_ROWS, Block, Call
from dualpace.cpu.qkv import Places, PreAttention, place

MAX_PROGRAMS = 256  # 100 KB each


class Layers:
    """x [rows, H] through the layers, for rows whose `decoder` has begun the round.

    post: None where only `attend` is called. rooms: of all of `pre` and `post`. caches: each
    layer's, of equal strides. A `timed` one keeps the `seconds` of each layer's kernels in `run`.
    Not for two threads.
    """

    def __init__(
        self,
        pre: Sequence[PreAttention],
        post: Sequence[PostAttention] | None,
        caches: Sequence[Tensor],
        decoder: PagedDecoder,
        rooms: Rooms,
        timed: bool = False,
    ) -> None:
        assert len(pre) == len(caches) and (post is None or len(post) == len(pre))
        assert len({cache.stride() for cache in caches}) == 1
        self.pre, self.post, self.caches, self.decoder = pre, post, caches, decoder
        self.timed, self.seconds = timed, np.zeros((len(caches), 7))
        self._rooms = rooms
        self._programs: dict[int, _Program] = {}
        self._state = rooms.state

    def prepare(self, rows: int) -> None:
        """Fill in now what rounds of so many rows share; it takes milliseconds."""
        self._program(rows)

    def begin(self, rows: int, places: Places, scale: float) -> None:
        """A round of so many rows, up to MAX_ROWS, whose tokens stand at `places`; `scale`
        multiplies the scores. Raises ValueError for sizes that do not fit together.
        """
        assert rows <= MAX_ROWS
        self._current = program = self._program(rows)
        self.pre[0].check(program.x, places, self.caches[0])
        place(program.products, places, self.caches[0])
        program.begin(self.decoder, self.caches[0], scale)
        self._places, self._scale = places, scale  # the kernels read the places

    def run(self, x: Tensor) -> Tensor:
        """bf16 [rows, H] behind the last layer; overwritten by the next round."""
        program = self._current
        assert program.whole is not None
        program.x.copy_(x)
        program.between(slice(None), program.x, program.attended)
        program.whole.run()
        if self.timed:
            self.seconds = program.whole.seconds().reshape(self.seconds.shape)
        return program.x

    def attend(self, layer: int, x: Tensor, out: Tensor) -> None:
        """x bf16 [rows, H] up to attention's output [rows, N * D], into `out`; whole rows both."""
        if self._rooms.state != self._state:  # a product between two layers made the rooms grow
            self.begin(len(x), self._places, self._scale)
        program = self._current
        assert x.shape == program.x.shape and out.shape == program.attended.shape
        assert x.dtype == out.dtype == torch.bfloat16 and x.stride(1) == out.stride(1) == 1
        program.between(layer, x, out)
        program.first_parts[layer].run()

    def _program(self, rows: int) -> "_Program":
        while True:
            if self._rooms.state != self._state or len(self._programs) > MAX_PROGRAMS:
                self._programs, self._state = {}, self._rooms.state
            if rows in self._programs:
                return self._programs[rows]
            self._programs[rows] = _Program(self, rows)  # the rooms may grow meanwhile


class _Program:
    """The chains for a number of rows, with the tensors between their kernels.

    x            bf16 [rows, H]: what goes in and comes out of the whole
    attended     bf16 [rows, N * D]: attention's output within the whole
    products     int64 [layers, fields]: the blocks of QKV's kernels
    first_parts  a chain a layer; `whole`, of all, is None without the second parts
    """

    def __init__(self, layers: Layers, rows: int) -> None:
        decoder, caches, post = layers.decoder, layers.caches, layers.post
        self.x = torch.empty(rows, layers.pre[0].hidden, dtype=torch.bfloat16)
        self._q = self.x.new_empty(rows, decoder.num_q_heads, decoder.head_dim)
        self._out = torch.empty_like(self._q)
        self.attended = self._out.flatten(1)
        self._caches = np.array([cache.data_ptr() for cache in caches])
        attention = Call(decoder.function, decode_kernel.NUM_FIELDS, decode_kernel.NUM_CHUNKS, 0)
        # Of one layer, in order; the others' blocks are copies, made each layer's own below.
        self._calls = (*layers.pre[0].calls(rows), attention)
        if post is not None:
            self._calls += post[0].calls(rows)
        blocks = [np.tile(call.block, (len(caches), 1)) for call in self._calls]
        self._norms, self.products, self._attention, *_ = blocks
        parts = []
        for i, cache in enumerate(caches):
            own = [block[i] for block in blocks]
            layers.pre[i].fill(own[:2], self.x, cache, self._q)
            if post is not None:
                post[i].fill(own[3:], self.attended, self.x, self.x)
            parts.append(_steps(self._calls, own))
        threads = torch.get_num_threads()
        self.first_parts = [Chain(steps[:3], threads) for steps in parts]
        self.whole = None
        if post is not None:
            self.whole = Chain([step for steps in parts for step in steps], threads, layers.timed)

    def begin(self, decoder: PagedDecoder, cache: Tensor, scale: float) -> None:
        """Have all layers attend by the round that the decoder has begun."""
        self._attention[:] = decoder.fill(self._q, cache, scale, self._out)
        self._attention[:, decode_kernel.CACHE] = self._caches

    def between(self, layer: int | slice, x: Tensor, out: Tensor) -> None:
        """What the first part of these layers reads and writes."""
        self._norms[layer, norm_kernel.INPUT] = x.data_ptr()
        self._norms[layer, norm_kernel.INPUT_STRIDE] = x.stride(0) * 2
        self._attention[layer, decode_kernel.OUT] = out.data_ptr()
        self._attention[layer, decode_kernel.OUT_STRIDE] = out.stride(0) * 2


def _steps(calls: Sequence[Call], blocks: Sequence[Block]) -> list[Step]:
    both = zip(calls, blocks, strict=True)
    return [Step(call.function, block, call.num_counters) for call, block in both]
