"""All layers of a decode iteration as one chain of kernels, where the dense stages run on tiles.

Seven kernels a layer: norm, QKV, attention, O, norm, gate and up, down. Everything in their
argument blocks but what a round brings is filled in once a number of rows. This file knows nothing
about requests or who owns the blocks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dualpace.cpu import decode_kernel
from dualpace.cpu.attention import PagedDecoder
from dualpace.cpu.chain import Chain, Step
from dualpace.cpu.dense_stage import PostAttention, Rooms
from dualpace.cpu.gemm import MAX_ROWS, Call
from dualpace.cpu.qkv import Places, PreAttention, place

_MOST_PROGRAMS = 256  # 100 KB each


class Layers:
    """x [rows, H] through every layer, for rows whose `decoder` has begun the round.

    rooms: of all of `pre` and `post`. caches: each layer's, of equal strides. A `timed` one keeps
    the `seconds` that kernels took. Not for two threads.
    """

    def __init__(
        self,
        pre: Sequence[PreAttention],
        post: Sequence[PostAttention],
        caches: Sequence[Tensor],
        decoder: PagedDecoder,
        rooms: Rooms,
        timed: bool = False,
    ) -> None:
        assert len(pre) == len(post) == len(caches)
        assert len({cache.stride() for cache in caches}) == 1
        self.pre, self.post, self.caches, self.decoder = pre, post, caches, decoder
        self.timed, self.seconds = timed, np.zeros((len(caches), 7))
        self._rooms = rooms
        self._programs: dict[int, _Program] = {}
        self._state = rooms.state

    def run(self, x: Tensor, places: Places, scale: float) -> Tensor:
        """bf16 [rows, H], rows up to MAX_ROWS; `places` says where the rows' tokens stand, `scale`
        multiplies the scores. The result is overwritten by the next run.

        Raises ValueError for sizes that do not fit together.
        """
        assert len(x) <= MAX_ROWS
        self.pre[0].check(x, places, self.caches[0])
        program = self._program(len(x))
        program.x.copy_(x)
        place(program.products, places, self.caches[0])
        program.attend(self.decoder, self.caches[0], scale)
        program.chain.run()
        if self.timed:
            self.seconds = program.chain.seconds().reshape(self.seconds.shape)
        return program.x

    def _program(self, rows: int) -> "_Program":
        while True:
            if self._rooms.state != self._state or len(self._programs) > _MOST_PROGRAMS:
                self._programs, self._state = {}, self._rooms.state
            if rows in self._programs:
                return self._programs[rows]
            self._programs[rows] = _Program(self, rows)  # the rooms may grow meanwhile


class _Program:
    """The chain for a number of rows, with the tensors between its kernels.

    x         bf16 [rows, H]: what goes in and comes out
    products  int64 [layers, fields]: the blocks of QKV's kernels
    """

    def __init__(self, layers: Layers, rows: int) -> None:
        decoder, caches = layers.decoder, layers.caches
        first, last = layers.pre[0], layers.post[0]
        self.x = torch.empty(rows, first.hidden, dtype=torch.bfloat16)
        self._q = self.x.new_empty(rows, decoder.num_q_heads, decoder.head_dim)
        self._out = torch.empty_like(self._q)
        self._caches = np.array([cache.data_ptr() for cache in caches])
        attention = Call(decoder.function, decode_kernel.NUM_FIELDS, decode_kernel.NUM_CHUNKS, 0)
        # Of one layer, in order; the others' blocks are copies, made each layer's own below.
        self._calls = (*first.calls(rows), attention, *last.calls(rows))
        blocks = [np.tile(call.block, (len(caches), 1)) for call in self._calls]
        _, self.products, self._attention, *_ = blocks
        steps = []
        for i, cache in enumerate(caches):
            own = [block[i] for block in blocks]
            layers.pre[i].fill(own[:2], self.x, cache, self._q)
            layers.post[i].fill(own[3:], self._out.flatten(1), self.x, self.x)
            steps += [
                Step(call.function, block, call.num_counters)
                for call, block in zip(self._calls, own, strict=True)
            ]
        self.chain = Chain(steps, torch.get_num_threads(), layers.timed)

    def attend(self, decoder: PagedDecoder, cache: Tensor, scale: float) -> None:
        """Have all layers attend by the round that the decoder has begun."""
        self._attention[:] = decoder.fill(self._q, cache, scale, self._out)
        self._attention[:, decode_kernel.CACHE] = self._caches
