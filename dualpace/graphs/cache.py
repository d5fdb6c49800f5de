"""GraphCache: (stage, device, bucket, dtype, tensor-parallel size, backend) -> executable.

Knows nothing about KV, attention or requests. `build` returns the Stages that a worker calls.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dualpace.graphs.backends import Backend, Stage, backend_of
from dualpace.graphs.background import Background
from dualpace.graphs.buckets import PIECE_S, rule_of_thumb, stage_buckets
from dualpace.graphs.builder import Builders, Report, best_count, build_all, num_steps
from dualpace.graphs.collective import Alone, Collective
from dualpace.graphs.executor import Stages
from dualpace.graphs.forms import HEAD_STAGES, Packer, stage_arguments
from dualpace.graphs.job import (
    COMPILED_STAGES,
    SHARDED_STAGES,
    Job,
    example_rows,
    stage_functions,
)
from dualpace.graphs.rope import rope_table
from dualpace.graphs.shard import WHOLE, Shard
from dualpace.graphs.sharded import ShardedStages
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.store import GraphStore, environment_key
from dualpace.graphs.table import Entry, StageTable, Unpadded
from dualpace.graphs.tuner import Times, choose, times_of
from dualpace.graphs.weights import Weights

ANY_ROWS = 0  # the bucket of an executable that takes any row count
_LARGEST = 512  # rows, where nobody says more
# What a start that waits for no compiler begins with, by the layout of weights it leaves.
_UNCOMPILED = {
    "tiles": "amx",
    "rows": "rows",
    "onednn": "packed",
    "vectors": "avx512-bf16",
    "plain": "eager",
}


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What an executable was built for."""

    stage: str
    device: str
    bucket: int
    dtype: str
    tp: int
    backend: str


class GraphCache:
    """The executables of one process, which serves one model on one device."""

    def __init__(self) -> None:
        self.graphs: dict[GraphKey, Stage] = {}
        self.times: dict[tuple[str, int], Times] = {}  # by (stage, bucket), where there is a choice
        self._spec: ModelSpec | None = None
        self.background: Background | None = None

    def build(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        device: str = "cpu",
        backend: str | Sequence[str] = "eager",
        buckets: Sequence[int] | Mapping[str, Sequence[int]] = (),
        max_context: int | None = None,
        shard: Shard = WHOLE,
        collective: Collective | None = None,
        cache_dir: str | Path | None = None,
        report: Report | None = None,
        processes: int = 0,
        start: str = "ahead",
    ) -> Stages:
        """Build every stage for every bucket (none given: the default ones) and return them.

        Weights are on `device` already; of a `shard` that is not the whole model they are its
        part, while `spec` is the whole model's, and `collective` joins it to the others. Of several
        backends the tuner picks by stage and bucket.
        `max_context` (tokens) bounds the RoPE table; `cache_dir` keeps what is compiled and timed
        for the next start. `processes` build at once, 0: this one. With `start` "tiered" what is
        not in `cache_dir` is built behind the caller's back, who calls `begin_round` to take it up.
        ConfigError for a backend that is unknown or cannot run these weights here, and for a folder
        that cannot be written.
        """
        assert self._spec in (None, spec), "one cache serves one model"
        self._spec = spec
        names = (backend,) if isinstance(backend, str) else tuple(backend)
        job = Job(
            shard.local(spec),
            _dtype_name(weights.embed.dtype),
            max_context or spec.max_context,
            torch.get_num_threads(),
            names,
            _sizes(buckets, shard.size),
        )
        cos, sin = (t.to(device) for t in rope_table(spec, job.max_context))
        loader = _Loader(self, job, weights, cos, sin, device, shard.size)

        def make(tables: dict[str, StageTable]) -> Stages:
            if shard.size == 1:
                return Stages(tables)
            assert (collective.rank, collective.size) == (shard.rank, shard.size)
            return ShardedStages(tables, collective, spec.vocab, job.spec.vocab)

        collective = collective or Alone()
        with ExitStack() as stack:
            if len(names) == 1 and not loader.backends[names[0]].static:
                stages = make({stage: loader.generic(stage, names[0]) for stage in loader.stages})
            elif device != "cpu":  # no store: the compiler's own places
                stages = make({stage: loader.static(stage, names[0]) for stage in loader.stages})
            elif start == "tiered" and cache_dir is not None and not _is_built(job, cache_dir):
                stages = make({stage: loader.generic(stage) for stage in loader.stages})
                self.background = Background(job, Path(cache_dir), loader.tables, stages)
            else:
                folder = cache_dir or stack.enter_context(tempfile.TemporaryDirectory())
                store = GraphStore(Path(folder), environment_key(job.threads))
                _build(job, store, Path(folder), processes, report)
                stages = make({"pre_layer": loader.generic("pre_layer"), **loader.tables(store)})
        return stages

    def close(self) -> None:
        """Stop what is being built in the background."""
        if self.background is not None:
            self.background.close()


class _Loader:
    """Makes tables of the real weights and of what is in the store."""

    def __init__(
        self,
        cache: GraphCache,
        job: Job,
        weights: Weights,
        cos: Tensor,
        sin: Tensor,
        device: str,
        tp: int,
    ) -> None:
        self.backends = job.backends()
        self._cache, self._job, self._device, self._tp = cache, job, device, tp
        self.stages = ("pre_layer", *job.stages)
        self._arguments = {
            stage: stage_arguments(stage, weights, cos, sin) for stage in self.stages
        }
        self._functions = stage_functions(job.spec)
        self._packers: dict[str, Packer] = {}
        self._dtype, self._place = weights.embed.dtype, cos.device

    def generic(self, stage: str, name: str | None = None) -> StageTable:
        """A table that needs no compiler, of backend `name` or in the likely layout."""
        forms = {backend.form for backend in self.backends.values()}
        likely = next((_UNCOMPILED[form] for form in _UNCOMPILED if form in forms), "eager")
        backend = backend_of(name or likely)
        return StageTable({ANY_ROWS: self._entry(backend, stage, ANY_ROWS, None)}, {})

    def static(self, stage: str, name: str) -> StageTable:
        """A table of the one backend, compiled now."""
        sizes = self._job.sizes.get(stage, self._job.sizes["pre_attention"])
        entries = {size: self._entry(self.backends[name], stage, size, None) for size in sizes}
        return StageTable(entries, rule_of_thumb(sizes))

    def tables(self, store: GraphStore) -> dict[str, StageTable]:
        """Every compiled stage, by what the store says of it."""
        found = times_of(self._job, store)
        self._cache.times = found or {}
        return {stage: self._table(stage, store) for stage in self._job.stages}

    def _table(self, stage: str, store: GraphStore) -> StageTable:
        sizes = self._job.sizes[stage]
        times = {size: self._cache.times.get((stage, size)) for size in sizes}
        timed = {size: t for size, t in times.items() if t is not None}
        costs: dict[str, dict[int, float]]  # by candidate and bucket
        if timed:
            chosen = choose(timed, lambda name: self.backends[name].form)
            costs = {n: {b: t[n] + PIECE_S for b, t in timed.items()} for n in self.backends}
        else:
            name = self._job.candidates[0]
            chosen, costs = dict.fromkeys(sizes, name), {name: rule_of_thumb(sizes)}
        entries = {
            size: self._entry(self.backends[name], stage, size, store)
            for size, name in chosen.items()
        }
        best = {size: costs[name][size] for size, name in chosen.items()}
        return StageTable(entries, best, self._unpadded(stage, costs, chosen, store))

    def _unpadded(
        self,
        stage: str,
        costs: Mapping[str, Mapping[int, float]],
        chosen: Mapping[int, str],
        store: GraphStore,
    ) -> Unpadded | None:
        """The fastest candidate of any row count over weights that are there anyway."""
        forms = {self.backends[name].form for name in chosen.values()}
        names = [
            name
            for name in costs
            if self.backends[name].form in forms and not self.backends[name].pads(self._device)
        ]
        if not names:
            return None

        def slowness(name: str) -> float:
            return sum(costs[name][b] / min(c[b] for c in costs.values()) for b in chosen)

        name = min(names, key=slowness)
        entries = {size: self._entry(self.backends[name], stage, size, store) for size in chosen}
        return Unpadded(entries, costs[name])

    def _entry(self, backend: Backend, stage: str, bucket: int, store: GraphStore | None) -> Entry:
        packer = self._packers.setdefault(backend.form, Packer(backend))
        function = self._functions[stage]
        weights = [packer(stage, function, arguments) for arguments in self._arguments[stage]]
        bucket_key = bucket if backend.static else ANY_ROWS
        key = GraphKey(stage, self._device, bucket_key, self._job.dtype, self._tp, backend.name)
        if key not in self._cache.graphs:
            rows = example_rows(stage, self._job.spec, bucket or 1, self._place, self._dtype)
            example = (*rows, *weights[0])
            self._cache.graphs[key] = backend.build(function, example, store)
        return Entry(self._cache.graphs[key], weights, backend.pads(self._device), backend.name)


def _build(
    job: Job, store: GraphStore, folder: Path, processes: int, report: Report | None
) -> None:
    """What the store lacks of the job, by child processes or here."""
    if not _is_built(job, folder) and processes:
        builders = Builders(job, folder, best_count(job, processes))
        try:
            builders.wait(report)
        finally:
            builders.close()
    for done, _ in enumerate(build_all(job, store), start=1):
        if report is not None and not processes:
            report(done, num_steps(job))


def _is_built(job: Job, cache_dir: str | Path) -> bool:
    """Whether the store has all of the job, so that a start only loads."""
    store = GraphStore(Path(cache_dir), environment_key(job.threads))
    store.check()
    return store.note(job.done_name()) is not None


def _sizes(
    buckets: Sequence[int] | Mapping[str, Sequence[int]], tp: int
) -> dict[str, tuple[int, ...]]:
    """Ascending buckets of each stage that is compiled; a rank of several has other stages."""
    if isinstance(buckets, Mapping):
        sizes = {stage: tuple(sorted(set(buckets[stage]))) for stage in COMPILED_STAGES}
    elif buckets:
        sizes = dict.fromkeys(COMPILED_STAGES, tuple(sorted(set(buckets))))
    else:
        sizes = stage_buckets(_LARGEST, 256, 1)
    if tp == 1:
        return sizes
    layers, final = sizes["post_attention"], sizes["logits"]
    return {stage: final if stage in HEAD_STAGES else layers for stage in SHARDED_STAGES}


def _dtype_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "float32"}[dtype]
