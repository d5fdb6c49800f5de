"""The IPEX backend against eager stages; runs in the environment of `make test-ipex`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("intel_extension_for_pytorch")

from dualpace.cpu.packed import LINEARS
from dualpace.errors import ConfigError
from dualpace.graphs.backends.ipex import Ipex, packs_bf16
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.load import load_weights
from dualpace.graphs.source import resolve_source


def test_a_cpu_that_it_does_not_pack_for_is_refused() -> None:
    if packs_bf16():
        Ipex().check("bf16")
        return
    with pytest.raises(ConfigError, match="AVX-512"):
        Ipex().check("bf16")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(not packs_bf16(), reason="bf16 is packed with AVX-512 only"),
        ),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_matrix_becomes_a_packed_layer(dtype: torch.dtype, has_bias: bool) -> None:
    weight, x = torch.randn(96, 64, dtype=dtype), torch.randn(3, 64, dtype=dtype)
    bias = torch.randn(96, dtype=dtype) if has_bias else None
    pack = Ipex().pack
    assert pack is not None
    handle = pack(weight, bias)
    layer = LINEARS[handle]
    assert type(layer).__module__.startswith("intel_extension_for_pytorch")
    expected = torch.nn.functional.linear(
        x.float(), weight.float(), bias if bias is None else bias.float()
    )
    error = (layer(x).float() - expected).abs().max()
    assert error <= (1e-5 if dtype == torch.float32 else 1e-2) * expected.abs().max()


@pytest.mark.skipif(not packs_bf16(), reason="the extension packs bf16 with AVX-512 only")
def test_stages_are_near_eager_ones() -> None:
    source = resolve_source("random:tiny")
    weights = load_weights(source, torch.bfloat16)
    ours = GraphCache().build(source.spec, weights, backend="ipex")
    eager = GraphCache().build(source.spec, weights)
    spec = source.spec
    for rows in (1, 5, 64):
        x, positions = torch.randn(rows, spec.hidden).bfloat16(), torch.arange(rows)
        attn = torch.randn(rows, spec.q_size).bfloat16()
        pairs = [
            *zip(
                ours.pre_attention(1, x, positions),
                eager.pre_attention(1, x, positions),
                strict=True,
            ),
            (ours.post_attention(1, attn, x), eager.post_attention(1, attn, x)),
            (ours.logits(x), eager.logits(x)),
        ]
        for got, expected in pairs:
            error = float((got.float() - expected.float()).abs().max())
            assert error <= 1.6e-2 * float(expected.float().abs().max())
