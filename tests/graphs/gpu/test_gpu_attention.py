"""Planning a paged batch, choosing an implementation, and the Triton decode kernel."""

import pytest
import torch

from dualpace.errors import ConfigError
from dualpace.graphs.attention import causal_prefill, paged_decode_reference
from dualpace.graphs.gpu import attention
from dualpace.graphs.gpu.attention import Choice, Heads, PagedRows
from dualpace.graphs.gpu.planned import PackedInputs

# Triton's interpreter multiplies no bf16 matrices.
DTYPES = [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]


def test_padding_rows_have_length_one_in_block_zero() -> None:
    rows = PagedRows.of([[5, 9], [3, 4, 8]], [17, 32], bucket=4)
    assert rows.indptr.tolist() == [0, 2, 4, 5, 6]
    assert rows.indices.tolist() == [5, 9, 3, 4, 0, 0]
    assert rows.last_lens.tolist() == [1, 16, 1, 1]
    assert rows.context_lens().tolist() == [17, 32, 1, 1]


def test_choice_states_its_reason() -> None:
    assert attention.choose(torch.float32).name == "triton"
    assert "float32" in attention.choose(torch.float32).reason
    with pytest.raises(ConfigError, match="attention=flash is unknown"):
        attention.choose(torch.bfloat16, "flash")
    with pytest.raises(ConfigError, match="flashinfer cannot run"):
        attention.choose(torch.float32, "flashinfer")


@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(3, 1, 24)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_agrees_with_the_reference(
    heads: Heads, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(heads.dim)
    cache = torch.randn(24, 2, heads.kv, 16, heads.dim, generator=generator).to(device, dtype)
    lens = [1, 16, 130, 33]
    blocks = torch.randperm(23, generator=generator).add(1).tolist()
    tables = [blocks[:1], blocks[1:2], blocks[2:11], blocks[11:14]]
    rows = PagedRows.of(tables, lens, bucket=5)
    q = torch.randn(5, heads.query, heads.dim, generator=generator).to(device, dtype)
    out = torch.full_like(q, torch.nan)

    decode = attention.make(Choice("triton", ""), heads, dtype, device).decode(5, 32)
    decode.plan(rows)
    decode.run(q, cache, out)

    padded = torch.zeros(5, 9, dtype=torch.int32)
    for i, table in enumerate(tables):
        padded[i, : len(table)] = torch.tensor(table)
    wanted = paged_decode_reference(
        q.float(), cache.float(), padded.to(device), rows.context_lens(), heads.dim**-0.5
    )
    error = (out.float() - wanted).norm() / wanted.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_later_chunks_see_what_was_stored(device: torch.device) -> None:
    heads = Heads(4, 2, 16)
    q, k, v = (torch.randn(40, n, 16, device=device) for n in (4, 2, 2))
    cache = torch.zeros(4, 2, 2, 16, 16, device=device)
    for token in range(40):
        cache[1 + token // 16, 0, :, token % 16] = k[token]
        cache[1 + token // 16, 1, :, token % 16] = v[token]
    wanted = causal_prefill(q, k, v, [40])
    prefill = attention.make(Choice("triton", ""), heads, torch.float32, device).prefill()
    prefill.plan([17], PagedRows.of([[1, 2, 3]], [40]))
    out = torch.full_like(q, torch.nan)
    prefill.run(q[23:], k[23:], v[23:], out[23:], cache)
    torch.testing.assert_close(out[23:], wanted[23:])
    prefill.plan([40])
    prefill.run(q, k, v, out)
    torch.testing.assert_close(out, wanted)


def test_packed_inputs_keep_their_addresses_and_their_tails(device: torch.device) -> None:
    inputs = PackedInputs({"a": (torch.int64, 3), "b": (torch.int32, 8)}, device)
    before = [view.data_ptr() for view in inputs.views.values()]
    a, b = torch.arange(3).numpy(), torch.arange(8, dtype=torch.int32).numpy()
    inputs.send({"a": a, "b": b}, "b")
    inputs.send({"a": a + 1, "b": b[:2] + 100}, "b")
    assert inputs.views["a"].tolist() == [1, 2, 3]
    assert inputs.views["b"].tolist() == [100, 101, 2, 3, 4, 5, 6, 7]
    assert [view.data_ptr() for view in inputs.views.values()] == before
