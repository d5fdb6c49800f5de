"""The table of decode attention: what is kept, who serves which bucket, and every cut's results."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dualpace.graphs.attention import paged_decode_reference
from dualpace.graphs.gpu import attention
from dualpace.graphs.gpu.attention import Choice, Heads
from dualpace.graphs.gpu.triton_attention import CUTS, Cut, TritonAttention
from dualpace.graphs.gpu.tune_attention import (
    TUNED,
    AttentionTable,
    TunedAttention,
    mixed_rows,
    tuned,
)

HEADS = Heads(4, 2, 16)


class Library:
    def decode(self, bucket: int, max_blocks: int) -> Any:
        return "library", bucket

    def prefill(self) -> Any:
        return "prefill"


def test_buckets_take_the_choice_of_the_next_measured_one(device: torch.device) -> None:
    table = AttentionTable({8: Cut(tile=32), 64: None})
    tuned = TunedAttention(Library(), TritonAttention(HEADS, torch.float32, device), table)
    assert tuned.decode(16, 4) == ("library", 16)
    assert tuned.decode(128, 4) == ("library", 128)  # larger than all that was measured
    own: Any = tuned.decode(4, 4)
    assert own._cut == Cut(tile=32)
    assert tuned.prefill() == "prefill"


def test_a_table_is_kept_for_what_it_was_measured_for(tmp_path: Path) -> None:
    table = AttentionTable({8: CUTS[1], 64: None}, {8: {"None": 2.0}, 64: {}})
    table.save(tmp_path / "attention.json", "this device")
    assert AttentionTable.load(tmp_path / "attention.json", "this device") == table
    assert AttentionTable.load(tmp_path / "attention.json", "another") is None
    (tmp_path / "attention.json").write_text("{")
    assert AttentionTable.load(tmp_path / "attention.json", "this device") is None


@pytest.mark.parametrize("cut", CUTS[::2], ids=str)
def test_every_cut_agrees_with_the_reference(cut: Cut, device: torch.device) -> None:
    lens = [70, 1, 33]
    rows = mixed_rows(lens)
    assert sorted(rows.indices.tolist()) == list(range(1, 10))
    cache = torch.randn(10, 2, HEADS.kv, 16, HEADS.dim, device=device)
    q = torch.randn(3, HEADS.query, HEADS.dim, device=device)
    out = torch.full_like(q, torch.nan)
    decode = TritonAttention(HEADS, torch.float32, device).decode(3, 9, cut)
    decode.plan(rows)
    decode.run(q, cache, out)
    tables = torch.zeros(3, 5, dtype=torch.int32)
    for i in range(3):
        own = rows.indices[rows.indptr[i] : rows.indptr[i + 1]]
        tables[i, : len(own)] = own
    wanted = paged_decode_reference(
        q, cache, tables.to(device), torch.tensor(lens), HEADS.dim**-0.5
    )
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_device_is_measured_once(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    device, heads, dtype = torch.device("cuda", 0), Heads(32, 8, 128), torch.bfloat16
    maker = attention.make(Choice("flashinfer", ""), heads, dtype, device)
    with torch.inference_mode():
        found = tuned(maker, heads, dtype, device, TUNED[0], tmp_path, 4)
        assert list(found.table.cuts) == [TUNED[0]]
        assert len(found.table.times[TUNED[0]]) == 1 + len(CUTS)  # all agree with the library
        again = tuned(maker, heads, dtype, device, TUNED[0], tmp_path, 4)
    assert again.table == found.table
