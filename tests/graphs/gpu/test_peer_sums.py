"""A row's sum over ranks in the kernel that norms it: the maths, the order, and the flags."""

import pytest
import torch

from dualpace.graphs.gpu.peer_sums import PeerSums
from dualpace.graphs.stages import rms_norm

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
