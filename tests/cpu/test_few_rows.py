"""Products of a few rows in float32, against float64."""

import random

import pytest
import torch
from torch import Tensor

from dualpace.cpu import packed
from dualpace.cpu.few_rows import MAX_ROWS, RowsLinear

SIZES = [(1, 1), (7, 5), (8, 8), (33, 100), (576, 64), (101, 577)]


def product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    exact = x.double() @ weight.double().T
    return exact if bias is None else exact + bias.double()


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 2))
def test_products_agree_with_float64(outputs: int, inputs: int, rows: int) -> None:
    torch.manual_seed(outputs + rows)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if rows % 2 else None
    x = torch.randn(rows, inputs)
    scale = x.abs().max() * weight.abs().max() * inputs
    error = (RowsLinear(weight, bias)(x) - product(weight, bias, x)).abs().max()
    assert error <= 2e-7 * scale + 1e-6


def test_any_shape() -> None:
    rng = random.Random(3)
    for _ in range(60):
        outputs, inputs, rows = rng.randint(1, 300), rng.randint(1, 300), rng.randint(1, MAX_ROWS)
        # Rows of wider matrices: what lies behind a row is not summed.
        weight = torch.randn(outputs, inputs + 9)[:, :inputs]
        x = torch.randn(rows, inputs + 3)[:, :inputs]
        torch.testing.assert_close(
            RowsLinear(weight)(x).double(), product(weight, None, x), rtol=1e-4, atol=1e-4
        )


def test_nothing_is_read_or_written_beside_the_matrices() -> None:
    """Neighbours that are not numbers would spoil sums, and writes behind the end would show."""
    wide = torch.full((20, 40), torch.nan)
    wide[3:14, 5:18] = weight = torch.randn(11, 13)
    x = torch.full((5, 40), torch.nan)
    x[1:4, 7:20] = rows = torch.randn(3, 13)
    found = RowsLinear(wide[3:14, 5:18])(x[1:4, 7:20])
    torch.testing.assert_close(found.double(), product(weight, None, rows), rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    linear, x = RowsLinear(torch.randn(50, 70)), torch.randn(MAX_ROWS, 70)
    whole = linear(x)
    for rows in range(1, MAX_ROWS):
        assert torch.equal(linear(x[:rows]), whole[:rows])
    assert torch.equal(linear(x.flip(0)), whole.flip(0))


def test_other_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        RowsLinear(torch.zeros(8, 8, dtype=torch.bfloat16))


def test_sixteen_lanes_on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpace.cpu.few_rows.has_avx512", lambda: True)
    for rows in (1, 2, 3, 8):
        weight, x = torch.randn(37, 45), torch.randn(rows, 45)
        torch.testing.assert_close(
            RowsLinear(weight)(x).double(), product(weight, None, x), rtol=1e-5, atol=1e-5
        )


def test_a_handle_leads_to_it() -> None:
    weight, x = torch.randn(40, 24), torch.randn(2, 24)
    handle = packed.register(RowsLinear(weight))
    found = packed.packed_linear(x, handle, 40)
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-5, atol=1e-5)
