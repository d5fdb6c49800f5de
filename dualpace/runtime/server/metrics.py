"""/metrics: vLLM's names where ours means the same, `dualpace_` names for what only we have.

What requests took is counted as they go (`request_metrics`); queues, pools and counters are the
engine's own, read when asked.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from dualpace.block import BLOCK_TOKENS
from dualpace.runtime.engine_client import EngineClient, EngineGone
from dualpace.runtime.server.request_metrics import RequestMetrics
from dualpace.runtime.types import ENGINES

_STATS_TIMEOUT_S = 2.0


class Metrics:
    """One registry a server; nothing global."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        model = client.plan.model
        labels = {"model_name": model.name, "engine": "0"}  # vLLM's; `engine` is a replica's number
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(client, labels)
        self.registry.register(self._engine)
        ProcessCollector(registry=self.registry)
        self.requests = RequestMetrics(self.registry, labels, model.max_context)
        client.on_round = self.requests.count_round

    async def render(self) -> bytes:
        """The exposition text. An engine that does not answer leaves its last snapshot standing."""
        if not self._client.is_ready:  # it may be busy with its start
            return generate_latest(self.registry)
        try:
            self._engine.snapshot = await self._client.stats(_STATS_TIMEOUT_S)
            self._engine.answered = True
        except (TimeoutError, EngineGone):
            self._engine.answered = False
        return generate_latest(self.registry)


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
        labels = dict(self._labels)
        pools = {"gpu": now["gpu_blocks"], "host": now["host_blocks"]}
        running = {"gpu": now["gpu_running"], "cpu": now["cpu_running"]}
        waiting = {"gpu": now["waiting"] + now["forming"], "cpu": now["cpu_waiting"]}
        deferred = now["copying"] + now["forming"]
        gpu = pools["gpu"]
        yield _gauge("vllm:num_requests_running", "In a batch", [(labels, sum(running.values()))])
        yield _gauge(
            "vllm:num_requests_waiting", "Not in a batch", [(labels, sum(waiting.values()))]
        )
        reasons = {"capacity": sum(waiting.values()) - deferred, "deferred": deferred}
        yield _gauge(
            "vllm:num_requests_waiting_by_reason",
            "For room in a batch, or for a copy of their KV or the form of their answer",
            [(labels | {"reason": reason}, value) for reason, value in reasons.items()],
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
        yield _counter("dualpace_transfers", "KV copies done", [({}, now["transfers"])])
        yield _counter(
            "dualpace_kv_blocks_checked",
            "Moved blocks found unchanged (kv.check_moves)",
            [({}, now["blocks_checked"])],
        )
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
        lost = [({"worker": name}, now["rounds_lost"].get(name, 0)) for name in ENGINES]
        yield _counter("dualpace_worker_rounds_lost", "Batches that a worker was lost with", lost)
        yield _counter(
            "dualpace_requests_given_up",
            "Requests with which alone a worker was lost",
            [({}, now["given_up"])],
        )


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
