"""Kernels in one region: their order on all threads, and all layers of a model against one after
the other.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from dualpace.cpu.attention import PagedDecoder, plan_decode
from dualpace.cpu.chain import Chain, Step
from dualpace.cpu.dense_stage import PostAttention, Rooms
from dualpace.cpu.gemm import TileLinear, Unit
from dualpace.cpu.isa import Level, detected
from dualpace.cpu.layers import Layers
from dualpace.cpu.qkv import Places, PreAttention

UNIT = Unit(True, detected().has(Level.AMX))
HIDDEN, INNER, HEADS, NUM_LAYERS, EPS = 96, 160, (6, 2, 64), 3, 1e-5


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_no_thread_begins_a_step_before_all_have_ended_the_one_before() -> None:
    seen: list[tuple[int, int]] = []
    blocks = [np.full(3, 7, np.int64) for _ in range(4)]
    callbacks = []

    def step(number: int) -> Callable[[int], None]:
        def run(_block: int) -> None:
            assert blocks[number].tolist() == [0, 0, 7]  # two counters, which start at 0
            seen.append((number, threading.get_native_id()))

        return run

    for number in range(4):
        callbacks.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(step(number)))
    addresses = [ctypes.cast(callback, ctypes.c_void_p).value for callback in callbacks]
    steps = [Step(at or 0, block, 2) for at, block in zip(addresses, blocks, strict=True)]
    chain = Chain(steps, 3)
    for _ in range(2):
        blocks[2][:2] = 5
        chain.run()
        assert [number for number, _ in seen] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
        assert len({thread for _, thread in seen}) == 3
        seen.clear()


def bf16(*size: int) -> torch.Tensor:
    values = torch.randn(*size)
    return (values / size[-1] ** 0.5 if len(size) == 2 else values).to(torch.bfloat16)


class Model:
    """A few layers, and how one after the other computes them."""

    def __init__(self) -> None:
        q_heads, kv_heads, dim = HEADS
        self.rooms, width = Rooms(), q_heads * dim
        qkv = [bf16(width + 2 * kv_heads * dim, HIDDEN) for _ in range(NUM_LAYERS)]
        self.pre = [
            PreAttention(bf16(HIDDEN), weight, HEADS, EPS, self.rooms, UNIT) for weight in qkv
        ]
        self.post = [
            PostAttention(
                *(bf16(HIDDEN, width), bf16(HIDDEN), bf16(2 * INNER, HIDDEN), bf16(HIDDEN, INNER)),
                *(EPS, self.rooms, UNIT),
            )
            for _ in range(NUM_LAYERS)
        ]
        self.decoder = PagedDecoder(q_heads, kv_heads, dim, torch.bfloat16)

    def one_by_one(self, x: torch.Tensor, places: Places, pool: torch.Tensor) -> torch.Tensor:
        for i in range(NUM_LAYERS):
            q = self.pre[i](x, places, pool[:, i])
            out = torch.empty_like(q)
            self.decoder.run(q, pool[:, i], 0.125, out)
            x = self.post[i](out.flatten(1), x)
        return x

    def begin(self, rows: int) -> tuple[torch.Tensor, Places, torch.Tensor]:
        """A round: x, places and the pool."""
        _, kv_heads, dim = HEADS
        lens = np.random.default_rng().integers(1, 60, rows)
        tables = torch.randperm(rows * 4).int().view(rows, 4)
        self.decoder.begin(plan_decode(lens, kv_heads, torch.get_num_threads()), tables)
        positions = torch.from_numpy(lens - 1)
        blocks = tables.gather(1, (positions // 16)[:, None])[:, 0].long()
        angles = torch.rand(rows, dim // 2)
        places = Places(angles.cos(), angles.sin(), blocks * 16 + positions % 16)
        return bf16(rows, HIDDEN), places, bf16(rows * 4, NUM_LAYERS, 2, kv_heads, 16, dim)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_chain_of_all_layers_is_the_layers_one_by_one(threads: int) -> None:
    torch.set_num_threads(threads)
    model = Model()
    pool = torch.empty(0)
    for rows in (1, 5, 37, 5):
        x, places, pool = model.begin(rows)
        before, expected_pool = x.clone(), pool.clone()
        expected = model.one_by_one(x, places, expected_pool)
        caches = list(pool.unbind(1))
        layers = Layers(model.pre, model.post, caches, model.decoder, model.rooms)
        layers.begin(rows, places, 0.125)
        for _ in range(2):  # nothing is left behind by the first
            assert torch.equal(layers.run(x), expected)
        assert torch.equal(pool, expected_pool) and torch.equal(x, before)
        by_halves = x
        for layer in range(NUM_LAYERS):
            out = torch.full((rows, 400), float("nan"), dtype=torch.bfloat16)
            layers.attend(layer, by_halves, out[:, :384])
            by_halves = model.post[layer](out[:, :384], by_halves)
        assert torch.equal(by_halves, expected) and out[:, 384:].isnan().all()
        assert torch.equal(layers.run(x), expected)


def test_memory_that_another_product_made_grow_is_found_again() -> None:
    model = Model()
    x, places, pool = model.begin(4)
    caches = list(pool.unbind(1))
    layers = Layers(model.pre, model.post, caches, model.decoder, model.rooms)
    layers.begin(4, places, 0.125)
    before = layers.run(x).clone()
    grow(model.rooms)
    layers.begin(4, places, 0.125)
    assert torch.equal(layers.run(x), before)


def test_memory_may_grow_between_the_layers_of_a_round() -> None:
    """As it does where post-attention is several products, of a rank or of another backend."""
    model = Model()
    x, places, pool = model.begin(4)
    expected_pool = pool.clone()
    q = model.pre[0](x, places, expected_pool[:, 0])
    expected = torch.empty_like(q)
    model.decoder.run(q, expected_pool[:, 0], 0.125, expected)
    layers = Layers(model.pre, None, list(pool.unbind(1)), model.decoder, model.rooms)
    layers.begin(4, places, 0.125)
    left = model.rooms.tiles._buffer  # which nobody else keeps
    grow(model.rooms)
    assert left is not model.rooms.tiles._buffer
    left.fill_(7)
    out = torch.empty(4, 384, dtype=torch.bfloat16)
    layers.attend(0, x, out)
    assert torch.equal(out.view_as(expected), expected) and torch.equal(pool, expected_pool)
    assert (left == 7).all()


def grow(rooms: Rooms) -> None:
    TileLinear(bf16(32, 8192), unit=UNIT, scratch=rooms.tiles)(bf16(500, 8192))
