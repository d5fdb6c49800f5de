"""The layout's arithmetic against torch's own shapes, and the sizes that design and paper name."""

import torch

from dualpace.runtime.kv import KvLayout

LLAMA_8B = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, itemsize=2)


def test_a_block_of_all_layers_is_one_piece_of_two_mib() -> None:
    assert LLAMA_8B.block_bytes == 2 * 2**20
    assert LLAMA_8B.piece_bytes == 64 * 2**10


def test_a_layer_of_the_host_pool_has_the_shape_of_one_in_hbm() -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, itemsize=4)
    pool = torch.zeros(layout.host_shape(5))
    assert pool[:, 1].shape == layout.hbm_shape(5)
    assert pool[0].is_contiguous() and pool[0].numel() * pool.itemsize == layout.block_bytes
    assert pool.numel() * pool.itemsize == layout.host_bytes(5)


def test_hbm_pools_of_all_layers_take_as_much_as_the_host_pool() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=4, head_dim=16, itemsize=2)
    one_layer = torch.zeros(layout.hbm_shape(7), dtype=torch.bfloat16)
    assert 2 * one_layer.numel() * one_layer.itemsize == layout.host_bytes(7)
