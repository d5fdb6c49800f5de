"""A row's sum over ranks in the kernel that norms it: the maths, the order, and the flags."""

import mmap
from functools import partial
from pathlib import Path

import pytest
import torch

from dualpace.graphs.collective import Collective
from dualpace.graphs.gpu.peer_sums import PeerSums
from dualpace.graphs.stages import rms_norm
from tests.graphs.ranks import in_processes

M, H, MOST = 3, 40, 5


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("turn", [0, 1])
def test_rows_of_all_ranks_are_added_and_flags_pass_on(
    ranks: int, turn: int, device: torch.device
) -> None:
    torch.manual_seed(ranks)
    # The interpreter's bf16 is not the device's.
    for dtype in (torch.float32, torch.bfloat16)[: 2 if device.type == "cuda" else 1]:
        parts = torch.randn(ranks, 2, M, H, device=device)  # a split in two on every rank
        sums = parts.sum(1).to(dtype)
        x, weight = (torch.randn(n, H, device=device).to(dtype) for n in (M, 1))
        wanted = sums[0].float()
        for of_rank in sums[1:]:
            wanted = wanted + of_rank.float()
        wanted = (x.float() + wanted).to(dtype)
        for rank in range(ranks):
            # The others have come already: their rows lie there, and their flags are raised.
            rows = [torch.zeros(2, MOST, H, dtype=dtype, device=device) for _ in range(ranks)]
            flags = [
                torch.zeros(2, MOST, ranks, dtype=torch.int32, device=device) for _ in range(ranks)
            ]
            for other in set(range(ranks)) - {rank}:
                rows[other][turn, :M] = sums[other]
                flags[rank][turn, :M, other] = 1
            out, h = x.clone(), torch.empty_like(x)
            peers = PeerSums(rank, rows, flags)
            peers.add_norm(parts[rank], out, weight[0], h, 1e-5, turn)
            assert torch.equal(out, wanted), "ranks add in one order"
            torch.testing.assert_close(h, rms_norm(wanted, weight[0], 1e-5))
            assert torch.equal(rows[rank][turn, :M], sums[rank])
            assert not flags[rank].any(), "what was waited for is lowered"
            for other in set(range(ranks)) - {rank}:
                raised = flags[other].nonzero().tolist()
                assert raised == [[turn, row, rank] for row in range(M)]


COUNTS = (3, 1, 2, 5, 5, 1, 4, 2)  # rows of one sum after another


def sums_of_a_rank(path: Path, gloo: Collective, _: Collective) -> list[torch.Tensor]:
    """What rank `gloo.rank` gets of sums whose rows and flags lie in a file that both map."""
    with path.open("r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.float32)
    rows, flags = memory[: 4 * MOST * H].view(2, 2, MOST, H), memory[4 * MOST * H :]
    flags = flags[: 8 * MOST].view(torch.int32).view(2, 2, MOST, 2)
    peers = PeerSums(gloo.rank, list(rows), list(flags))
    generator = torch.Generator().manual_seed(gloo.rank)
    found = []
    for index, count in enumerate(COUNTS):
        parts = torch.randn(1, count, H, generator=generator)
        x, h = torch.ones(count, H), torch.empty(count, H)
        peers.add_norm(parts, x, torch.ones(H), h, 1e-5, index % 2)
        found += [x, h]
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu covers the device")
def test_ranks_wait_for_each_others_rows(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    path.write_bytes(bytes(4 * (4 * MOST * H + 8 * MOST)))
    first, second = in_processes(2, partial(sums_of_a_rank, path), tmp_path)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for index, count in enumerate(COUNTS):
        parts = [torch.randn(count, H, generator=generator) for generator in generators]
        assert torch.equal(first[2 * index], 1 + (parts[0] + parts[1]))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
