"""/metrics: vLLM's names where ours means the same, `dualpace_` names for what only we have.

Latencies are measured here, in the front, on the monotonic clock; queues, pools and counters are
the engine's own, read when asked.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from dualpace.block import BLOCK_TOKENS
from dualpace.runtime.engine_client import EngineClient, EngineGone
from dualpace.runtime.generation import Piece
from dualpace.runtime.types import ENGINES

_STATS_TIMEOUT_S = 2.0
_LABELS = ("model_name", "engine")  # vLLM's; its `engine` is a replica's number
_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    40,
)
_BETWEEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """One registry a server; nothing global."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._labels = {"model_name": client.plan.model.name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(client, self._labels)
        self._registry.register(self._engine)
        ProcessCollector(registry=self._registry)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens")
        self._generated = self._counter("vllm:generation_tokens", "Tokens sent to clients")
        self._ended = Counter(
            "vllm:request_success",
            "Requests by how they ended",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort"):
            self._ended.labels(**self._labels, finished_reason=reason)
        self._first_s = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_S
        )
        self._between_s = self._histogram(
            "vllm:inter_token_latency_seconds", "From token to token", _BETWEEN_S
        )
        self._per_token_s = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time a token after its first",
            _BETWEEN_S,
        )
        self._request_s = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token", _REQUEST_S
        )
        self._decode_s = self._histogram(
            "vllm:request_decode_time_seconds", "First to last token", _REQUEST_S
        )
        self._prompt_len = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS
        )
        self._output_len = self._histogram(
            "vllm:request_generation_tokens", "Tokens of an answer", _TOKENS
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, _LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(**self._labels)

    async def render(self) -> bytes:
        """The exposition text. An engine that does not answer leaves its last snapshot standing."""
        if not self._client.is_ready:  # it may be busy with its start
            return generate_latest(self._registry)
        try:
            self._engine.snapshot = await self._client.stats(_STATS_TIMEOUT_S)
            self._engine.answered = True
        except (TimeoutError, EngineGone):
            self._engine.answered = False
        return generate_latest(self._registry)

    async def observe(
        self, pieces: AsyncGenerator[Piece, None], prompt_len: int, arrival_s: float
    ) -> AsyncGenerator[Piece, None]:
        """Passes one answer's pieces on, and counts them; `arrival_s` of `time.monotonic()`."""
        last_s = arrival_s
        first_s: float | None = None
        num_tokens = 0
        reason: str | None = None
        self._prompt_tokens.inc(prompt_len)
        self._prompt_len.observe(prompt_len)
        try:
            async for piece in pieces:
                now = time.monotonic()
                if first_s is None:
                    first_s = now
                    self._first_s.observe(now - arrival_s)
                else:
                    self._between_s.observe(now - last_s)
                last_s = now
                num_tokens += len(piece.token_ids)
                self._generated.inc(len(piece.token_ids))
                reason = piece.finish_reason
                yield piece
        finally:
            await pieces.aclose()
            self._ended.labels(**self._labels, finished_reason=reason or "abort").inc()
            if reason is not None and first_s is not None:
                self._request_s.observe(last_s - arrival_s)
                self._decode_s.observe(last_s - first_s)
                self._output_len.observe(num_tokens)
                if num_tokens > 1:
                    self._per_token_s.observe((last_s - first_s) / (num_tokens - 1))


class _EngineCollector(Collector):
    """Turns the engine's last snapshot into metrics."""

    def __init__(self, client: EngineClient, labels: Mapping[str, str]) -> None:
        self.snapshot: dict[str, Any] = {}
        self.answered = False
        self._client = client
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        client, kv = self._client, self._client.plan.kv
        config = {
            "block_size": str(BLOCK_TOKENS),
            "num_gpu_blocks": str(kv.gpu_blocks),
            "num_cpu_blocks": str(kv.host_blocks),
        }
        yield _gauge(
            "vllm:cache_config_info", "Sizes of the KV pools", [(config | {"engine": "0"}, 1)]
        )
        yield _counter(
            "dualpace_tokens",
            "Tokens by the engine that made them",
            [({"engine": name}, client.num_tokens[name]) for name in ENGINES],
        )
        yield _gauge(
            "dualpace_engine_answers", "1 while the engine answers", [({}, int(self.answered))]
        )
        idle = client.num_requests == 0
        since_s = 0.0 if idle else time.monotonic() - client.progress_s
        yield _gauge(
            "dualpace_seconds_since_progress",
            "Since the last tokens came while requests wait for some",
            [({}, since_s)],
        )
        if self.snapshot:
            yield from self._of_snapshot(self.snapshot)

    def _of_snapshot(self, now: dict[str, Any]) -> Iterator[Metric]:
        labels = self._labels
        pools = {"gpu": now["gpu_blocks"], "host": now["host_blocks"]}
        running = {"gpu": now["gpu_running"], "cpu": now["cpu_running"]}
        waiting = {"gpu": now["waiting"], "cpu": now["cpu_waiting"]}
        gpu = pools["gpu"]
        yield _gauge("vllm:num_requests_running", "In a batch", [(labels, sum(running.values()))])
        yield _gauge(
            "vllm:num_requests_waiting", "Not in a batch", [(labels, sum(waiting.values()))]
        )
        yield _gauge(
            "vllm:kv_cache_usage_perc",
            "Used part of the GPU's KV pool, 0 to 1",
            [(labels, gpu["used"] / max(gpu["capacity"], 1))],
        )
        preempted = now["events"].get("preempted", 0)
        yield _counter("vllm:num_preemptions", "Preemptions", [(labels, preempted)])
        for name, text, values in (
            ("dualpace_requests_running", "Scheduled by this engine", running),
            ("dualpace_requests_waiting", "For this engine", waiting),
        ):
            yield _gauge(name, text, [({"engine": key}, value) for key, value in values.items()])
        for part in ("used", "capacity"):
            yield _gauge(
                f"dualpace_kv_blocks_{part}",
                "Blocks of 16 tokens",
                [({"pool": pool}, blocks[part]) for pool, blocks in pools.items()],
            )
        for name, text, label, values in (
            ("dualpace_rounds", "Batches run", "engine", now["rounds"]),
            ("dualpace_busy_seconds", "Time in batches", "engine", now["busy_s"]),
            ("dualpace_routes", "CPU batches by route", "route", now["routes"]),
            ("dualpace_events", "Scheduling decisions", "event", now["events"]),
            ("dualpace_assist_seconds", "Dense Assist by part", "part", now["assist_s"]),
        ):
            yield _counter(name, text, [({label: key}, value) for key, value in values.items()])
        yield _counter("dualpace_preemptions", "Requests sent back", [({}, preempted)])
        yield _counter("dualpace_transfers", "KV copies done", [({}, now["transfers"])])
        yield _counter("dualpace_assists", "Dense Assists served", [({}, now["assist_calls"])])
        yield _counter(
            "dualpace_graph_compiles_after_ready",
            "Compilations while serving; anything above 0 is a fault",
            [({}, now["compiles_after_ready"])],
        )
        ranks = [({"worker": role}, len(w["pids"])) for role, w in now["workers"].items()]
        yield _gauge("dualpace_worker_ranks", "Processes that run", ranks)
        ready = [({"worker": role}, int(w["ready"])) for role, w in now["workers"].items()]
        yield _gauge("dualpace_worker_ready", "0 while it is started again", ready)
        restarts = [({"worker": role}, w["restarts"]) for role, w in now["workers"].items()]
        yield _counter("dualpace_worker_restarts", "Workers started again", restarts)


_Samples = Sequence[tuple[Mapping[str, str], float]]


def _gauge(name: str, text: str, samples: _Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=_names(samples)), samples)


def _counter(name: str, text: str, samples: _Samples) -> Metric:
    """`name` without `_total`, which the format appends."""
    return _filled(CounterMetricFamily(name, text, labels=_names(samples)), samples)


def _names(samples: _Samples) -> list[str]:
    return list(samples[0][0]) if samples else []


def _filled(family: Any, samples: _Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    assert isinstance(family, Metric)
    return family
