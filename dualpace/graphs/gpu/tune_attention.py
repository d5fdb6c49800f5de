"""Measures which decode attention serves each bucket best on this device: the library's, or our
Triton kernel in one of its cuts.

Contexts are long and of mixed lengths, half of the time each. A kernel of ours counts only if it
finds what the library finds. The table goes to disk under a key of everything that could change it.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor

from dualpace.block import BLOCK_TOKENS
from dualpace.graphs.gpu import triton_attention, tune
from dualpace.graphs.gpu.attention import Decode, Heads, Maker, PagedRows, Prefill
from dualpace.graphs.gpu.triton_attention import CUTS, Cut, TritonAttention

TUNED = (8, 64, 256)  # rows that are measured; others take the next one's choice
_MIXES = ((1024,), (256, 256, 1024, 2560))  # tokens of contexts, in turn
_BYTES = 256 << 20  # of K and V that calls go round, so that none is found in the cache
_HANDICAP = 1.02  # of ours: a tie leaves the library
_TOLERANCE = 1e-2  # of the library's result, by norm


@dataclass(slots=True)
class AttentionTable:
    """Cut by measured bucket, None for the library; milliseconds of a layer of each candidate."""

    cuts: dict[int, Cut | None] = field(default_factory=dict)
    times: dict[int, dict[str, float]] = field(default_factory=dict)

    def of(self, bucket: int) -> Cut | None:
        near = min((size for size in self.cuts if size >= bucket), default=None)
        return None if near is None else self.cuts[near]

    def save(self, path: Path, key: str) -> None:
        """Published whole: a reader sees the old file or the new one."""
        rows = [
            {"rows": bucket, "cut": cut and asdict(cut), "times": self.times.get(bucket)}
            for bucket, cut in self.cuts.items()
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"key": key, "choices": rows}, file, indent=1)
        os.replace(file.name, path)

    @classmethod
    def load(cls, path: Path, key: str) -> AttentionTable | None:
        """None where there is none, or where it was measured for something else or is damaged."""
        try:
            stored = json.loads(path.read_text())
            if stored["key"] != key:
                return None
            table = cls()
            for row in stored["choices"]:
                table.cuts[row["rows"]] = row["cut"] and Cut(**row["cut"])
                table.times[row["rows"]] = row["times"] or {}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return table


class TunedAttention:
    """The library for prompts, and for decode whatever the table says."""

    def __init__(self, library: Maker, own: TritonAttention, table: AttentionTable) -> None:
        self._library, self._own, self.table = library, own, table

    def decode(self, bucket: int, max_blocks: int) -> Decode:
        return _decode_of(self._library, self._own, self.table.of(bucket), bucket, max_blocks)

    def prefill(self) -> Prefill:
        return self._library.prefill()


def _decode_of(
    library: Maker, own: TritonAttention, cut: Cut | None, bucket: int, max_blocks: int
) -> Decode:
    if cut is None:
        return library.decode(bucket, max_blocks)
    return own.decode(bucket, max_blocks, cut)


def tuned(
    library: Maker,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    largest: int,
    folder: Path | None = None,
    processes: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> TunedAttention:
    """`library` with decode of up to `largest` rows by the fastest, read from `folder` or measured
    and written there. Takes up to 1.5 GB of the device meanwhile.
    """
    own = TritonAttention(heads, dtype, device)
    path, key = _path(folder, heads, dtype, device) if folder else (None, "")
    table = (AttentionTable.load(path, key) if path else None) or AttentionTable()
    above = next((size for size in TUNED if size >= largest), TUNED[-1])
    missing = [size for size in TUNED if size <= above and size not in table.cuts]
    if missing:
        _compile(own, heads, dtype, missing, processes)
        for bucket in missing:
            times = _measure(library, own, heads, dtype, device, bucket)
            best = min((cut for cut in (None, *CUTS) if str(cut) in times), key=_cost(times))
            table.cuts[bucket], table.times[bucket] = best, times
            progress(f"attention of {bucket} rows: {best or 'the library'}")
        torch.cuda.empty_cache()  # the pool comes next and takes what there is
        if path:
            table.save(path, key)
    return TunedAttention(library, own, table)


def _cost(times: dict[str, float]) -> Callable[[Cut | None], float]:
    return lambda cut: times[str(cut)] * (1.0 if cut is None else _HANDICAP)


def _path(folder: Path, heads: Heads, dtype: torch.dtype, device: torch.device) -> tuple[Path, str]:
    source = b"".join(Path(m).read_bytes() for m in (triton_attention.__file__, __file__))
    facts = (torch.cuda.get_device_name(device), heads, dtype, torch.__version__)
    key = repr((*facts, triton.__version__, hashlib.sha256(source).hexdigest()[:16]))
    return folder / f"attention-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json", key


def _compile(
    own: TritonAttention, heads: Heads, dtype: torch.dtype, buckets: Sequence[int], processes: int
) -> None:
    """Every kernel in child processes, which leave them in Triton's cache on disk."""
    splits = {(cut, own.decode(bucket, bucket, cut).splits) for bucket in buckets for cut in CUTS}
    jobs = [(heads, dtype, cut, count) for cut, count in sorted(splits, key=str)]
    tune.in_processes(triton_attention.compile_decode, jobs, processes)


def _measure(
    library: Maker,
    own: TritonAttention,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    bucket: int,
) -> dict[str, float]:
    """Milliseconds of a layer by candidate, of those that agree with the library."""
    mixes = [mixed_rows([mix[i % len(mix)] for i in range(bucket)]) for mix in _MIXES]
    blocks = max(len(rows.indices) for rows in mixes)
    shape = (blocks + 1, 2, heads.kv, BLOCK_TOKENS, heads.dim)
    size = int(np.prod(shape)) * dtype.itemsize
    caches = torch.randn(-(-_BYTES // size), *shape, dtype=dtype, device=device)
    q = torch.randn(bucket, heads.query, heads.dim, dtype=dtype, device=device)
    wanted: list[Tensor] = []
    times = {}
    for cut in (None, *CUTS):
        decode = _decode_of(library, own, cut, bucket, blocks)
        total, agrees = 0.0, True
        for index, rows in enumerate(mixes):
            decode.plan(rows)
            out = torch.empty_like(q)
            work = [partial(decode.run, q, cache, out) for cache in caches]
            total += tune.time_of(work, device)
            if cut is None:
                wanted.append(out.float())
            difference = (out.float() - wanted[index]).norm() / wanted[index].norm()
            agrees = agrees and bool(difference < _TOLERANCE)
        if agrees:
            times[str(cut)] = total / len(mixes)
    return times


def mixed_rows(lens: Sequence[int]) -> PagedRows:
    """Contexts of these lengths over scattered blocks, none twice and none of them block 0."""
    starts = np.cumsum([0, *(-(-n // BLOCK_TOKENS) for n in lens)])
    ids = np.random.default_rng(0).permutation(starts[-1]) + 1
    return PagedRows.of([ids[a:b].tolist() for a, b in pairwise(starts.tolist())], lens)
