"""The layout's arithmetic against torch's own strides, and the sizes that design and paper name."""

import torch

from dualpace.runtime.kv import KvLayout

LLAMA_8B = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, itemsize=2)


def test_a_block_of_all_layers_is_one_piece_of_two_mib() -> None:
    assert LLAMA_8B.block_bytes == 2 * 2**20
    assert LLAMA_8B.piece_bytes == 64 * 2**10
    assert LLAMA_8B.token_bytes == 128 * 2**10
    assert LLAMA_8B.blocks_in(2**30 + 1) == 512


def test_host_layer_view_has_the_stated_strides_and_offsets() -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, itemsize=4)
    pool = torch.zeros(layout.host_shape(5))
    view = pool[:, 1]
    assert view.shape == layout.hbm_shape(5)
    assert view.stride() == layout.host_layer_strides
    assert pool[2, 1].data_ptr() - pool.data_ptr() == layout.host_offset(2, 1)
    assert pool.numel() * pool.itemsize == layout.host_bytes(5)


def test_hbm_pools_of_all_layers_take_as_much_as_the_host_pool() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=4, head_dim=16, itemsize=2)
    one_layer = torch.zeros(layout.hbm_shape(7), dtype=torch.bfloat16)
    assert 2 * one_layer.numel() * one_layer.itemsize == layout.hbm_bytes(7) == layout.host_bytes(7)
