"""Benchmark of paged attention on both pool layouts, beside a plain read of the very pool.

Attention and reading take turns, in one chain of kernels as in serving, so that what else the
machine does meanwhile counts for both. Each time another layer and block table is taken, so that
little is left in the cache. This file knows nothing about serving.
"""

from statistics import median
from typing import Any

import torch
from torch import Tensor

from dualpace.cpu.attention_case import AttentionCase, Heads
from dualpace.cpu.bench_peers import sdpa, vllm, why_no_vllm
from dualpace.cpu.ceilings import Reader, best_seconds, in_turns
from dualpace.cpu.chain import Chain, Step
from dualpace.cpu.decode_kernel import NUM_CHUNKS
from dualpace.cpu.isa import Level

GB = 1e9
_PARTS, _LEAST_PART = 8, 1 << 21  # of a pool, and bytes, that are read between two of attention


class Chained:
    """A case's attention as a worker runs it: one of a chain of kernels, behind others that have
    filled the caches. Here those read the pool, a part each, so that what is read and what attends
    are timed in one run.
    """

    def __init__(self, case: AttentionCase, threads: int) -> None:
        size = max(case.memory.numel() // _PARTS, min(_LEAST_PART, case.memory.numel()))
        self.readers = [Reader(part, threads) for part in torch.split(case.memory, size)]
        blocks = [case.filled(turn) for turn in range(len(self.readers))]
        steps = []
        for reader, block in zip(self.readers, blocks, strict=True):
            steps += [reader.step(), Step(case.decoders[0].function, block, NUM_CHUNKS)]
        self._chain = Chain(steps, threads, timed=True)
        self.times: list[float] = []  # of attention
        self.rates: list[float] = []  # of reading, bytes/s

    def run(self) -> None:
        self._chain.run()
        seconds = self._chain.seconds()
        self.times += seconds[1::2].tolist()
        self.rates += [r.bytes / t for r, t in zip(self.readers, seconds[::2], strict=True)]


def attention_table(
    heads: Heads,
    memory: Tensor,
    batches: tuple[tuple[int, int], ...],
    threads: int,
    options: Any,
) -> list[dict[str, Any]]:
    """Records of all (rows, context); options: repeats, level, and chunks and heads of the plan."""
    missing, kept = why_no_vllm(heads.dtype), str(heads.dtype).removeprefix("torch.")
    print(f"\nattention, {heads.q}/{heads.kv} heads of {heads.dim}, {kept}; medians")
    print(missing or "vLLM's CPU attention on K and V in a cache of its own")
    print(
        "rows context layout           MB       ms   GB/s  pool read  ratio  called ms"
        "   SDPA ms  vLLM ms    error"
    )
    records = []
    for rows, context in batches:
        for block_major in (False, True):
            case = AttentionCase(heads, memory, rows, context, block_major, options.level)
            case.plan(threads, chunks_per_thread=options.chunks, heads_per_item=options.heads)
            chained = Chained(case, threads)
            chained.run()
            chained.times, chained.rates = [], []
            calls = in_turns({"chained": chained.run, "called": case.run}, options.repeats)
            seconds, error = median(chained.times), case.error()
            rate, read = case.bytes / seconds, median(chained.rates)
            peers = {} if block_major else _peers(case, options.level, missing is None)
            record = {
                "rows": rows,
                "context": context,
                "layout": "block-major" if block_major else "per-layer",
                "mb": round(case.bytes / 1e6, 1),
                "ms": round(seconds * 1e3, 4),
                "gb_s": round(rate / GB, 1),
                "pool_read_gb_s": round(read / GB, 1),
                "of_read": round(rate / read, 3),
                "called_ms": round(median(calls["called"]) * 1e3, 4),
                "peers_ms": peers,
                "right": error < 2**-7,
            }
            records.append(record)
            print(
                f"{rows:4} {context:7} {record['layout']:12} {record['mb']:8.1f} "
                f"{record['ms']:8.3f} {record['gb_s']:6.1f} {record['pool_read_gb_s']:10.1f} "
                f"{record['of_read']:6.0%} {record['called_ms']:10.3f} {peers.get('sdpa', ''):>9} "
                f"{peers.get('vllm', ''):>8} {error:8.1e}",
                flush=True,
            )
    return records


def _peers(case: AttentionCase, level: Level, has_vllm: bool) -> dict[str, float]:
    """Milliseconds of others' attention on the K and V of the case's last run."""
    runs = {"sdpa": sdpa(case)} | ({"vllm": vllm(case, level)} if has_vllm else {})
    return {name: round(best_seconds(run, 2) * 1e3, 3) for name, run in runs.items()}
