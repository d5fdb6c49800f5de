"""One measurement from its settings to its result: server, load, arithmetic, files."""

import asyncio
import gc
import json
import logging
import math
import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dualpace.errors import ConfigError
from dualpace.runtime.bench import timeline
from dualpace.runtime.bench.client import Client
from dualpace.runtime.bench.counters import engine_facts
from dualpace.runtime.bench.load import Generator, Outcome, ramped
from dualpace.runtime.bench.metrics import RequestRecord, summarize
from dualpace.runtime.bench.progress import progress
from dualpace.runtime.bench.start import running_server
from dualpace.runtime.bench.workload import RequestSpec, load_workload, means
from dualpace.settings.schema import BenchConfig
from dualpace.version import version

log = logging.getLogger(__name__)

_LATE_MS = 20.0  # a client later than this at P99 may have been the bottleneck


@dataclass(slots=True)
class Served:
    """What the server said about itself: its model, its version, the measured profile in use, its
    own counters over the run."""

    model: str
    version: str | None
    profile: str | None  # None: another server, or one without
    facts: dict[str, Any]


def bench(config: BenchConfig, command: str = "") -> list[dict[str, Any]]:
    """Measure at each of `bench.rates` (else once), against one server, and return the results:
    metrics as `vllm bench serve` names them, and what they were measured on (`command` says how to
    do it again).

    Writes `result` and `bench.records` where they are named, as soon as each is known. Under
    `bench.resume` a point with a result is not measured again; where all have one no server starts.
    Raises ConfigError for settings that cannot work, and for a server that does not start or
    answers nothing.
    """
    steps = [with_rate(config, rate) for rate in config.bench.rates or [config.workload.rate]]
    requests = [scheduled(step) for step in steps]
    known = [earlier(*point) for point in zip(steps, requests, strict=True)]
    if all(known):
        return [result for result in known if result]
    raise_file_limit(max(map(len, requests)))
    if config.bench.out is not None:
        Path(config.bench.out).mkdir(parents=True, exist_ok=True)  # also for logs named in it
    results, sent = [], 0
    longest = max(r.prompt_len + r.output_len for arrivals in requests for r in arrivals)
    with running_server(config, longest) as url:
        for step, arrivals, result in zip(steps, requests, known, strict=True):
            if result is not None:
                results.append(result)
                continue
            outcome, served = asyncio.run(drive(step, arrivals, url))
            sent += config.bench.warmup
            some_answered(outcome, url)
            result = describe(step, arrivals, served, command) | measured(step, outcome)
            result |= served.facts
            result["input_lens"] = [r.prompt_len for r in outcome.records if r.completed]
            result["output_lens"] = [r.num_tokens for r in outcome.records if r.completed]
            result["timeline"] = make_timeline(step, outcome, sent)
            warn(result)
            write(step, outcome, result)
            results.append(result)
            sent += len(arrivals)
    return results


def with_rate(config: BenchConfig, rate: float) -> BenchConfig:
    """At this rate, for `bench.seconds` where they are set. ConfigError where that has no end."""
    workload, seconds = replace(config.workload, rate=rate), config.bench.seconds
    if seconds is not None:
        if not (0 < rate < math.inf and seconds > 0):
            raise ConfigError(
                f"bench.seconds={seconds:g} at rate {rate:g} is no number of requests: give finite "
                f"values above 0, or leave bench.seconds out and set workload.num_requests."
            )
        workload = replace(workload, num_requests=max(round(rate * seconds), 1))
    return replace(config, workload=workload)


def earlier(config: BenchConfig, requests: Sequence[RequestSpec]) -> dict[str, Any] | None:
    """The result of the same requests that `bench.out` has, under `bench.resume`."""
    path = result_path(config)
    if not config.bench.resume or path is None or not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    key = ("num_requests", "prompt_mean", "output_mean", "seed")
    same = [result.get(name) for name in key] == [
        len(requests),
        *means(requests),
        config.workload.seed,
    ]
    return result if same else None


def some_answered(outcome: Outcome, url: str) -> None:
    """ConfigError where nothing was: that is no result to be kept, or shown in a figure."""
    if not any(record.completed for record in outcome.records):
        first = outcome.records[0].error or "an answer without tokens"
        raise ConfigError(
            f"The server at {url} answered none of {len(outcome.records)} requests: {first}."
        )


def measured(config: BenchConfig, outcome: Outcome) -> dict[str, Any]:
    percentiles = sorted({*config.bench.percentiles, 99.0})  # tables and figures need P99
    metrics = summarize(outcome.records, targets(config), percentiles)
    return metrics | client_facts(outcome, metrics["duration"])


def write(config: BenchConfig, outcome: Outcome, result: dict[str, Any]) -> None:
    if config.bench.records:
        write_records(Path(config.bench.records), outcome)
    if path := result_path(config):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")  # a run may be cut at any time
        partial.write_text(json.dumps(result))
        partial.replace(path)


def targets(config: BenchConfig) -> dict[str, float]:
    """Those of `bench.goodput` that are set."""
    return {key: ms for key, ms in asdict(config.bench.goodput).items() if ms is not None}


def scheduled(config: BenchConfig) -> list[RequestSpec]:
    requests = load_workload(config.workload)
    if config.bench.ramp_from is None:
        return requests
    rate = config.workload.rate
    return ramped(requests, config.bench.ramp_from, rate, config.bench.ramp_shape)


async def drive(
    config: BenchConfig, requests: Sequence[RequestSpec], url: str
) -> tuple[Outcome, Served]:
    load = config.bench
    async with Client(url, load.timeout_s) as client:
        card = await client.model_card(load.model)
        with progress(len(requests)) as on_answer:
            generator = Generator(
                client,
                card["id"],
                vocab=load.vocab,
                seed=config.workload.seed,
                room=card.get("max_model_len") or 32768,
                on_answer=on_answer,
            )
            await generator.warm_up(requests[0], load.warmup)
            before = await client.text("/metrics")
            gc.collect()
            gc.freeze()  # the prompts live to the end; collections need not look at them
            outcome = await generator.run(requests, load.concurrency)
            gc.unfreeze()
        facts = engine_facts(before, await client.text("/metrics"), outcome.end_s)
        about = await client.text("/version")
        version = said(about, "version")
        version = version or said(await client.text("/props"), "build_info")  # llama.cpp's
    return outcome, Served(card["id"], version, said(about, "profile"), facts)


def said(text: str | None, key: str) -> str | None:
    """The word that a page has for its server under `key`, if it is JSON and has one."""
    try:
        word = json.loads(text or "")[key]
    except (ValueError, KeyError, TypeError):
        return None
    return word if isinstance(word, str) else None


def describe(
    config: BenchConfig, requests: Sequence[RequestSpec], served: Served, command: str
) -> dict[str, Any]:
    """What the numbers were measured on; the second half are keys of `vllm bench serve`."""
    prompt_mean, output_mean = means(requests)
    load, workload = config.bench, config.workload
    rate = workload.rate if math.isfinite(workload.rate) else "inf"
    return {
        "kind": "measured",
        "profile": load.profile or f"{config.hw.name}_{served.model}",
        "policy": label(config),
        "variant": config.variant,
        "workload": workload.label or workload.name,
        "rate": rate,
        "arrival": workload.arrival,
        "ramp_from": load.ramp_from,
        "num_requests": len(requests),
        "prompt_mean": prompt_mean,
        "output_mean": output_mean,
        "seed": workload.seed,
        "output_estimate": config.kv.output_estimate,
        "server_version": served.version,
        "server_profile": served.profile,
        "machine": machine(),
        "command": command,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "label": label(config),
        "model_id": served.model,
        "num_prompts": len(requests),
        "request_rate": rate,
        "burstiness": 1.0,
        "max_concurrency": load.concurrency,
    }


def label(config: BenchConfig) -> str:
    return config.bench.label or config.bench.peer or config.policy.name


def machine() -> dict[str, Any]:
    return {
        "dualpace": version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
    }


def cpu_name() -> str:
    """Its product name, where the kernel says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def client_facts(outcome: Outcome, duration: float) -> dict[str, Any]:
    """Whether the client kept up: its lateness, its share of a core, wrong lengths."""
    lag_ms = sorted(1e3 * lag for lag in outcome.lag_s)
    return {
        "client_lag_p99_ms": lag_ms[int(0.99 * (len(lag_ms) - 1))],
        "client_cores": outcome.cpu_s / (duration or 1.0),
        "wrong_lengths": len(outcome.wrong_lens),
        "errors": sorted({r.error for r in outcome.records if r.error is not None})[:5],
    }


def warn(result: dict[str, Any]) -> None:
    if result["failed"]:
        log.warning("%d requests failed, for example: %s", result["failed"], result["errors"][0])
    if result["wrong_lengths"]:
        log.warning("%d answers or prompts had another length", result["wrong_lengths"])
    if result["client_lag_p99_ms"] > _LATE_MS:
        log.warning(
            "the client was up to %.0f ms late at P99: it may have been the bottleneck",
            result["client_lag_p99_ms"],
        )


def make_timeline(config: BenchConfig, outcome: Outcome, earlier: int) -> dict[str, Any]:
    """From the round log of a server that this run started and sent `earlier` requests before;
    else from what clients saw."""
    path = config.runtime.round_log
    firsts = [r.token_times_s[0] for r in outcome.records if r.completed]
    if path is None or config.bench.url or config.bench.peer or not firsts:
        return timeline.from_records(outcome.records)
    # A server numbers its requests from 1.
    return timeline.from_round_log(Path(path), earlier + 1, min(firsts))


def write_records(path: Path, outcome: Outcome) -> None:
    """A JSON line a request: scheduled, sent and token times in seconds from the run's start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for record, sent_s in zip(outcome.records, outcome.sent_s, strict=True):
            file.write(json.dumps(record_line(record, sent_s)) + "\n")


def record_line(record: RequestRecord, sent_s: float) -> dict[str, Any]:
    return {**asdict(record), "output_len": record.num_tokens, "sent_s": sent_s}


def result_path(config: BenchConfig) -> Path | None:
    """`result`, or a name of the run's own in `bench.out`."""
    if config.result:
        return Path(config.result)
    if config.bench.out is None:
        return None
    kind = config.workload.label or config.workload.name
    words = [label(config), config.variant, kind, f"{config.workload.rate:g}"]
    name = "-".join(word for word in words if word)
    return Path(config.bench.out) / (name.replace("/", "_").replace(" ", "_") + ".json")


def raise_file_limit(connections: int) -> None:
    """A connection a request under way, all of them in the worst case."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
        if limit < wanted:
            raise ConfigError(
                f"workload.num_requests={connections} may need as many connections and this "
                f"process may open {hard} files: raise `ulimit -n`, or ask for fewer."
            )
