"""The autotuner: times the candidates of a stage and bucket on this machine, and picks.

Times are kept in the store as notes, so that a machine is asked once. Candidates run in turn over
several layers' made-up weights, so that a disturbance hits all alike and no weight stays in a cache
that serving would find cold. Pre-attention is timed with K and V stored in a pool, which is what
follows it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dualpace.block import BLOCK_TOKENS
from dualpace.graphs.backends import Arguments, Backend, Stage
from dualpace.graphs.backends.whole import stored_by
from dualpace.graphs.forms import HEAD_STAGES, Packer
from dualpace.graphs.job import Examples, Job, stage_functions
from dualpace.graphs.store import GraphStore

# Weights that calls go round: more than the caches that a serving round leaves cold anyway.
_BYTES, _LAYERS = 64 << 20, 8
_SECONDS = 0.06  # for each candidate, if that allows the fewest repeats
_REPEATS = (2, 40)  # fewest that count, and most
# A second copy of a stage's weights, in another layout, must save more than this share of the time.
TOLERANCE = 0.05

Times = dict[str, float]  # seconds of a call by candidate


def tune_all(job: Job, store: GraphStore) -> Iterator[tuple[str, int]]:
    """Note the times of every (stage, bucket) that has none, and yield each.

    Processes of one thread share the stages, as they share the machine when they serve. Those of
    several threads would have the same cores: one of them at a time.
    """
    backends = job.backends()
    pending = list(job.stages)
    while pending:
        later = []
        for stage in pending:
            section = f"tuning-{stage}" if job.threads == 1 else "tuning"
            try:
                with store.alone(section, wait=False):
                    yield from _tune(job, stage, backends, store)
            except BlockingIOError:
                later.append(stage)
        if later == pending:
            time.sleep(0.05)
        pending = later


def _tune(
    job: Job, stage: str, backends: Mapping[str, Backend], store: GraphStore
) -> Iterator[tuple[str, int]]:
    bench: _Bench | None = None
    for bucket in job.sizes[stage]:
        name = job.note_name(stage, bucket)
        if store.note(name) is None:
            bench = bench or _Bench(job, stage, backends)
            times = bench.times(bucket, store)
            note = {"model": job.label(), "stage": stage, "bucket": bucket}
            store.write_note(name, {**note, "seconds": times})
        yield stage, bucket


def times_of(job: Job, store: GraphStore) -> dict[tuple[str, int], Times] | None:
    """The noted times of the whole job; None if any are missing."""
    found = {}
    for stage, bucket in job.pairs():
        note = store.note(job.note_name(stage, bucket))
        if note is None or set(note["seconds"]) != set(job.candidates):
            return None
        found[stage, bucket] = note["seconds"]
    return found


def choose(times: Mapping[int, Times], form_of: Callable[[str], str]) -> dict[int, str]:
    """The candidate of each bucket of a stage.

    The fastest; but where candidates of another layout of the weights win only here and by little,
    the best of the layout that most buckets chose, so that there is one copy of the weights.
    """
    best = {bucket: min(t, key=lambda name: t[name]) for bucket, t in times.items()}
    common = Counter(form_of(name) for name in best.values()).most_common(1)[0][0]
    for bucket, t in times.items():
        of_common = [name for name in t if form_of(name) == common]
        rival = min(of_common, key=lambda name: t[name])
        if t[rival] <= t[best[bucket]] * (1 + TOLERANCE):
            best[bucket] = rival
    return best


class _Bench:
    """The candidates of one stage over made-up weights."""

    def __init__(self, job: Job, stage: str, backends: Mapping[str, Backend]) -> None:
        self._stage, self._backends, self._spec = stage, backends, job.spec
        self._function = stage_functions(job.spec)[stage]
        self._examples = Examples(job, fill=0.01)
        self._clock = time.thread_time if job.threads == 1 else time.perf_counter
        layers = [self._examples.weights(stage)]
        size = sum(a.nbytes for a in layers[0] if a is not None)
        if stage not in HEAD_STAGES:
            count = min(_LAYERS, job.spec.num_layers, 1 + _BYTES // size)
            layers += [self._examples.weights(stage) for _ in range(count - 1)]
        packers = {b.form: Packer(b) for b in backends.values()}
        self._weights: dict[str, list[Arguments]] = {
            form: [packer(stage, self._function, layer) for layer in layers]
            for form, packer in packers.items()
        }

    @torch.inference_mode()
    def times(self, bucket: int, store: GraphStore) -> Times:
        rows = self._examples.rows(self._stage, bucket)
        calls: dict[str, tuple[Stage, list[Arguments]]] = {}
        same: dict[tuple[Stage, str], str] = {}  # the first candidate of each executable
        twins: dict[str, str] = {}
        for name, backend in self._backends.items():
            weights = self._weights[backend.form]
            call = backend.build(self._function, (*rows, *weights[0]), store)
            twins[name] = same.setdefault((call, backend.form), name)
            if twins[name] == name:
                calls[name] = (self._as_served(call, bucket), weights)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        least, most = _REPEATS
        started = time.perf_counter()
        for repeat in range(most):
            for name, (call, weights) in calls.items():
                before = self._clock()
                call(*rows, *weights[repeat % len(weights)])
                samples[name].append(self._clock() - before)
            if repeat == 0 and min(s[0] for s in samples.values()) < _SECONDS / 2:
                samples = {name: [] for name in calls}  # what only a first call does shows there
                continue
            spent = time.perf_counter() - started
            if len(samples[name]) >= least and spent > _SECONDS * len(calls):
                break
        found = {name: sorted(s)[len(s) // 4] for name, s in samples.items()}
        return {name: found[twin] for name, twin in twins.items()}

    def _as_served(self, call: Stage, bucket: int) -> Stage:
        """The executable with what follows it wherever it is called."""
        if self._stage != "pre_attention":
            return call
        spec, like = self._spec, self._examples.rows("post_attention", 1)[0]
        assert like is not None
        blocks = -(-bucket // BLOCK_TOKENS)
        cache = like.new_zeros(blocks, 2, spec.num_kv_heads, BLOCK_TOKENS, spec.head_dim)
        slots = torch.arange(bucket)

        def run(x: Tensor, positions: Tensor, *weights: Tensor | None) -> Tensor:
            return stored_by(call, x, positions, weights, cache, slots)

        return run
