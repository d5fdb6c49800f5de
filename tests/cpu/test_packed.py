"""Packed linears: results, use inside compiled graphs, and handles."""

import pytest
import torch

from dualpace.cpu.packed import pack, packed_linear, register


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_matches_float64(dtype: torch.dtype, rows: int) -> None:
    weight, bias = torch.randn(48, 96).to(dtype), torch.randn(48).to(dtype)
    x = torch.randn(rows, 96).to(dtype)
    for b in (None, bias):
        handle = pack(weight, b)
        exact = torch.nn.functional.linear(
            x.double(), weight.double(), None if b is None else b.double()
        )
        result = packed_linear(x, handle, 48)
        assert result.dtype == dtype and result.shape == (rows, 48)
        torch.testing.assert_close(
            result.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
        )


def test_one_graph_serves_all_layers() -> None:
    handles = [pack(torch.randn(32, 32)) for _ in range(3)]
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def stage(x: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
        return packed_linear(x + 1, handle, 32) * 2

    x = torch.randn(4, 32)
    for handle in handles:
        assert torch.equal(stage(x, handle), packed_linear(x + 1, handle, 32) * 2)
    assert len(graphs) == 1


def test_any_linear_can_stand_behind_a_handle_and_lives_as_long() -> None:
    handle = register(lambda x: x @ torch.full((2, 3), 2.0))
    assert torch.equal(packed_linear(torch.ones(1, 2), handle, 3), torch.full((1, 3), 4.0))
    number = int(handle)
    del handle
    with pytest.raises(KeyError):
        packed_linear(torch.ones(1, 2), torch.tensor(number), 3)


def test_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match="bf16 or float32 matrix"):
        pack(torch.ones(2, 2, dtype=torch.float16))
