"""Post-attention as a whole: against float64, and its norm by itself."""

import pytest
import torch
import torch.nn.functional as F

from dualpace.cpu.dense_stage import PostAttention, Rooms, norm_rows, takes
from dualpace.cpu.gemm import TileLinear, Unit
from dualpace.cpu.isa import Level, detected

UNIT = Unit(True, detected().has(Level.AMX))
HIDDEN, WIDTH, INNER, EPS = 96, 64, 160, 1e-5


def bf16(*size: int) -> torch.Tensor:
    return torch.randn(*size).to(torch.bfloat16)


def weights() -> list[torch.Tensor]:
    sizes = ((HIDDEN, WIDTH), (HIDDEN,), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    return [bf16(*size) / size[-1] ** 0.5 if len(size) == 2 else bf16(*size) for size in sizes]


def exact(attn: torch.Tensor, x: torch.Tensor, layer: list[torch.Tensor]) -> torch.Tensor:
    o, norm, gate_up, down = (w.double() for w in layer)
    x = x.double() + attn.double() @ o.T
    gate, up = (F.rms_norm(x, (HIDDEN,), norm, EPS) @ gate_up.T).chunk(2, 1)
    return x + (F.silu(gate) * up) @ down.T


def test_layers_that_share_memory_match_float64() -> None:
    rooms, layers = Rooms(), [weights() for _ in range(2)]
    stages = [PostAttention(*layer, EPS, rooms, UNIT) for layer in layers]
    for rows in (1, 37, 4):
        for layer, stage in zip(layers, stages, strict=True):
            attn, x = bf16(rows, WIDTH), bf16(rows, HIDDEN)
            before = x.clone()
            result = stage(attn, x)
            assert torch.equal(x, before)
            reference = exact(attn, x, layer)
            assert (result.double() - reference).norm() < 0.01 * reference.norm()


def test_memory_that_another_product_made_grow_is_found_again() -> None:
    rooms, layer = Rooms(), weights()
    stage, attn, x = PostAttention(*layer, EPS, rooms, UNIT), bf16(4, WIDTH), bf16(4, HIDDEN)
    before = stage(attn, x)
    TileLinear(bf16(32, 8192), unit=UNIT, scratch=rooms.tiles)(bf16(500, 8192))
    assert torch.equal(stage(attn, x), before)


@pytest.mark.parametrize("rows", [1, 5])
def test_norm_of_strided_rows(rows: int) -> None:
    x, weight = bf16(rows, 300)[:, 20:250], bf16(230)
    out = torch.full_like(x, float("nan"))
    norm_rows(x, weight, EPS, out)
    scaled = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + EPS)
    wanted = weight * scaled.to(torch.bfloat16)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=0)


def test_refuses_what_does_not_fit() -> None:
    o, norm, gate_up, down = weights()
    assert takes(o, gate_up, down) and not takes(o.float(), gate_up, down)
    with pytest.raises(ValueError, match="norm"):
        PostAttention(o, norm.float(), gate_up, down, EPS, unit=UNIT)
    with pytest.raises(ValueError, match="fit together"):
        PostAttention(o, norm, gate_up, bf16(HIDDEN, INNER + 32), EPS, unit=UNIT)
