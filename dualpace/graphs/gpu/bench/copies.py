"""KV over the link: registration, swaps and write-out against a plain pinned copy."""

from __future__ import annotations

import mmap
import time

import numpy as np
import torch

from dualpace.graphs.gpu import kv
from dualpace.graphs.gpu.bench.setting import (
    CUDA,
    HOST_BLOCKS,
    POOL_BLOCKS,
    PROMPT,
    Bench,
    timed,
)
from dualpace.graphs.gpu.host_memory import HostMemory


def ceilings(bench: Bench) -> None:
    """Copy bandwidth on the device (bytes read plus written) and over the link."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=CUDA).random_()
    target = torch.empty_like(source)
    bench.copy_rate = 2 * source.nbytes / timed(lambda: target.copy_(source)) * 1e3
    bench.note("copy_TBs", round(bench.copy_rate / 1e12, 3))
    total = torch.zeros((), dtype=torch.float32, device=CUDA)
    words = source.view(torch.float32)
    read = timed(lambda: torch.sum(words, dim=0, out=total))
    bench.note("read_TBs", round(source.nbytes / read / 1e9, 3))


def swaps(bench: Bench) -> None:
    """Registration, swap and write-out rates against a plain copy from registered memory."""
    shape = (HOST_BLOCKS, *bench.pool[:, 0].shape)
    count = int(np.prod(shape)) * 2
    host = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.bfloat16).view(shape)
    began = time.perf_counter()
    memory = HostMemory(host, host[0].nbytes)
    seconds = time.perf_counter() - began
    bench.note("register_s_per_GiB", round(seconds / (count / 2**30), 3))
    large = torch.empty(256, *shape[1:], dtype=torch.bfloat16, device=CUDA)
    down = timed(lambda: host[:256].copy_(large, non_blocking=True), 5, 2)
    up = timed(lambda: large.copy_(host[:256], non_blocking=True), 5, 2)
    ceiling = {"out": large.nbytes / down / 1e6, "in": large.nbytes / up / 1e6}
    bench.note("link_GBs", {k: round(v, 1) for k, v in ceiling.items()})
    mover = kv.BlockMover(bench.pool, host, chunk_blocks=memory.chunk_pieces)
    for blocks in (32, 64, 256):
        hbm = (torch.randperm(POOL_BLOCKS - 1)[:blocks] + 1).tolist()
        targets = (torch.randperm(HOST_BLOCKS - 1)[:blocks] + 1).tolist()
        moved = blocks * host[0].nbytes
        out = timed(lambda h=hbm, t=targets: mover.swap_out(h, t), 5, 2)
        by_kernel = timed(lambda h=hbm, t=targets: mover.swap_out_by_kernel(h, t), 5, 2)
        back = timed(lambda h=hbm, t=targets: mover.swap_in(t, h), 5, 2)
        rates = {"out": out, "out_kernel": by_kernel, "in": back}
        rates = {k: moved / ms / 1e6 for k, ms in rates.items()}
        shown = {k: f"{v:.1f} GB/s ({v / ceiling[k.split('_')[0]]:.2f})" for k, v in rates.items()}
        bench.note(f"swap_{blocks}_blocks", shown)
        assert torch.equal(host[targets[0]], bench.pool[:, hbm[0]].cpu()), "swap"
    k, v = (torch.randn(PROMPT, *bench.rows.k.shape[1:], device=CUDA).bfloat16() for _ in range(2))
    blocks = torch.randperm(HOST_BLOCKS - 1)[: PROMPT // 16].add(1).int().to(CUDA)
    for programs in (8, 16, 32):

        def write(programs=programs) -> None:
            for layer in range(4):
                kv.write_out(k, v, host, layer, blocks, programs)

        rate = 4 * 2 * k.nbytes / timed(write, 5, 2) / 1e6
        shown = f"{rate:.1f} GB/s ({rate / ceiling['out']:.2f})"
        bench.note(f"write_out_{programs}_programs", shown)
    torch.cuda.synchronize()
    stored = host[blocks.cpu().long(), 1].transpose(2, 3)
    assert torch.equal(stored[:, 0].flatten(0, 1), k.cpu()), "write-out"
    assert torch.equal(stored[:, 1].flatten(0, 1), v.cpu()), "write-out"
    memory.close()
