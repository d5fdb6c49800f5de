"""The engine under a trace's lengths, all requests at once, prompts as token ids and no HTTP.

    python scripts/bench_engine.py trace=FILE requests=2000 [stop_s=S] [skip_s=S] [result=FILE]
        [key=value ...]

`key=value` are settings as for serving. With `stop_s` the run is cut short, and rates are those of
the time between `skip_s` and the cut; else those of the whole run, and of its 10 to 70 %. Ends with
one JSON line: rates, latencies, the device's idle share, and both engines' tokens a second.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dualpace.errors import ConfigError
from dualpace.options import key_values, number, sentences, whole
from dualpace.runtime.bench.config import AzureWorkloadConfig
from dualpace.runtime.bench.metrics import RequestRecord, summarize, window_rates
from dualpace.runtime.bench.workload import RequestSpec, load_workload
from dualpace.runtime.engine_client import EngineClient
from dualpace.runtime.plan import Plan
from dualpace.runtime.sampling_params import SamplingParams
from dualpace.runtime.types import ENGINES
from dualpace.settings.compose import load
from dualpace.settings.resolve import resolve

VLLM = {"pressed": (12.04, 3188.0), "uncapped": (20.69, 5480.0)}  # requests/s, output tokens/s
_OWN_KEYS = ("trace", "requests", "stop_s", "skip_s", "result", "label")
_PRESSED_BLOCKS = 4096  # pools up to here are compared with vLLM's of 2,560 blocks


def main() -> None:
    options = key_values(sys.argv[1:], __doc__ or "")
    own = {key: options.pop(key) for key in _OWN_KEYS if key in options}
    with sentences():
        result = run(own, [f"{key}={value}" for key, value in options.items()])
    line = json.dumps(result)
    if "result" in own:
        Path(own["result"]).write_text(line + "\n")
    print(line)


def run(own: dict[str, str], overrides: Sequence[str]) -> dict[str, Any]:
    """One run; prints what people want to know of it."""
    if "trace" not in own:
        raise ConfigError("trace=FILE is needed: the CSV file of an Azure trace.")
    workload = AzureWorkloadConfig(
        name="azure", path=own["trace"], num_requests=whole(own, "requests", 2000)
    )
    stop_s, skip_s = number(own, "stop_s", 0) or None, number(own, "skip_s", 0)
    requests = load_workload(workload)
    with tempfile.TemporaryDirectory() as folder:
        keys = [override.partition("=")[0] for override in overrides]
        if "runtime.round_log" not in keys:
            overrides = [*overrides, f"runtime.round_log={folder}/rounds.jsonl"]
        plan = resolve(load(*overrides))
        assert plan.runtime.round_log is not None
        log = Path(plan.runtime.round_log)
        longest = max(r.prompt_len + r.output_len for r in requests)
        if longest > plan.model.max_context:
            raise ConfigError(
                f"trace={own['trace']} holds a request of {longest} tokens and the context is "
                f"{plan.model.max_context}: choose another model or a larger pool."
            )
        for line in plan.lines():
            print(line, flush=True)
        if plan.server.cores:
            os.sched_setaffinity(0, plan.server.cores)
        client = EngineClient.launch(plan)
        records, facts = asyncio.run(_drive(client, plan, requests, stop_s))
        rounds = [json.loads(line) for line in log.read_text().splitlines() if line]
    result = {"label": own.get("label", ""), **facts}
    result |= summarize([r for r in records if r.token_times_s])
    result |= _rates(records, skip_s, stop_s)
    result |= round_facts(rounds)
    capped = plan.kv.gpu_blocks <= _PRESSED_BLOCKS
    result["vllm"] = VLLM["pressed" if capped else "uncapped"]
    for key in sorted(result):
        if not isinstance(result[key], list | dict):
            print(f"{key}: {result[key]}", flush=True)
    return result


async def _drive(
    client: EngineClient, plan: Plan, requests: Sequence[RequestSpec], stop_s: float | None
) -> tuple[list[RequestRecord], dict[str, Any]]:
    client.on_phase = lambda text: print(
        f"{time.monotonic() - client.start_s:7.1f} s  {text}", file=sys.stderr, flush=True
    )
    began_s = time.monotonic()
    await client.connect()
    info = await client.wait_ready()
    ready_s = time.monotonic() - began_s
    cpu_s = _cpu_seconds(client.process.pid)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)
    started_s = time.monotonic()

    async def follow(spec: RequestSpec, record: RequestRecord) -> None:
        prompt = rng.integers(0, plan.model.vocab, spec.prompt_len).tolist()
        stream = client.submit(prompt, replace(params, max_tokens=spec.output_len))
        async for update in stream:
            now = time.monotonic() - started_s
            record.token_times_s += [now] * len(update.token_ids)
            record.cpu_tokens += sum(ENGINES[engine] == "cpu" for engine in update.engines)

    records = [RequestRecord(r.id, 0.0, r.prompt_len) for r in requests]
    tasks = [
        asyncio.create_task(follow(spec, record))
        for spec, record in zip(requests, records, strict=True)
    ]
    ended, pending = await asyncio.wait(tasks, timeout=stop_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in ended:
        task.result()  # a refused request, or an engine that has gone
    took_s = time.monotonic() - started_s
    engine_share = (_cpu_seconds(client.process.pid) - cpu_s) / took_s
    stats = await client.stats(30)
    for task in pending:
        task.cancel()
    await asyncio.wait(tasks)
    await client.close()
    finished = [
        bool(len(r.token_times_s) == s.output_len) for r, s in zip(records, requests, strict=True)
    ]
    for record, done in zip(records, finished, strict=True):
        record.error = None if done else "cut short"
    return records, {
        "ready_s": ready_s,
        "start": info,
        "stats": stats,
        "finished": sum(finished),
        "engine_cpu_share": engine_share,
    }


def _cpu_seconds(pid: int) -> float:
    """What a process and its threads have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rates(
    records: Sequence[RequestRecord], skip_s: float, stop_s: float | None
) -> dict[str, float]:
    """Requests and output tokens a second, whole and within a window."""
    span = max((r.token_times_s[-1] for r in records if r.token_times_s), default=0.0)
    low, high = (skip_s, span) if stop_s is not None else (0.1 * span, 0.7 * span)
    return {
        "span_s": span,
        "requests_per_s": sum(r.completed for r in records) / max(span, 1e-9),
        "output_tokens_per_s": sum(r.num_tokens for r in records) / max(span, 1e-9),
        **window_rates(records, low, high),
    }


def round_facts(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the round log says: idle share of the device, and tokens a second of both engines."""
    gpu = [r for r in rounds if r["engine"] == "gpu"]
    cpu = [r for r in rounds if r["engine"] == "cpu"]
    facts: dict[str, Any] = {"gpu_rounds": len(gpu), "cpu_rounds": len(cpu)}
    if gpu:
        facts["gpu_idle_share"] = _idle(gpu)
        facts["gpu_idle_share_decode_only"] = _idle_between(gpu, _is_decode)
        decode = [r["duration"] * 1e3 for r in gpu if _is_decode(r)]
        facts["decode_rounds"] = len(decode)
        facts["decode_round_ms_median"] = statistics.median(decode) if decode else 0.0
        facts["gpu_batch_mean"] = statistics.fmean(len(r["batch"]) for r in gpu)
        for key in ("prefill_gpu", "prefill_cpu", "swap_out", "swap_in", "preempted"):
            facts[f"num_{key}"] = sum(len(r[key]) for r in gpu)
    if cpu:
        lengths = [r["duration"] for r in cpu]
        gaps = [b["t"] - a["t"] - a["duration"] for a, b in pairwise(cpu)]
        facts["cpu_iteration_ms_median"] = statistics.median(lengths) * 1e3
        facts["cpu_batch_mean"] = statistics.fmean(len(r["batch"]) for r in cpu)
        facts["cpu_longest_gap_iterations"] = max(gaps, default=0.0) / statistics.median(lengths)
        facts["cpu_busy_share"] = sum(lengths) / (cpu[-1]["t"] + lengths[-1] - cpu[0]["t"])
    first = min((r["t"] for r in rounds), default=0.0)
    facts["tokens_by_second"] = {"gpu": _by_second(gpu, first), "cpu": _by_second(cpu, first)}
    return facts


def _is_decode(record: dict[str, Any]) -> bool:
    moved = ("prefill_gpu", "prefill_cpu", "swap_out", "swap_in")
    return bool(record["batch"]) and not any(record[key] for key in moved)


def _idle(rounds: Sequence[dict[str, Any]]) -> float:
    """Share of the time from the first round's start to the last one's end that no round ran."""
    span = rounds[-1]["t"] + rounds[-1]["duration"] - rounds[0]["t"]
    return float(1 - sum(r["duration"] for r in rounds) / span) if span > 0 else 0.0


def _idle_between(rounds: Sequence[dict[str, Any]], counts: Any) -> float:
    """The same share over pairs of neighbours that both count."""
    pairs = [(a, b) for a, b in pairwise(rounds) if counts(a) and counts(b)]
    gaps = sum(max(b["t"] - a["t"] - a["duration"], 0.0) for a, b in pairs)
    busy = sum(b["duration"] for _, b in pairs)
    return gaps / (gaps + busy) if pairs else 0.0


def _by_second(rounds: Sequence[dict[str, Any]], first: float) -> list[int]:
    """Rows that ended in each second since the first round: what Figure 1 is drawn from."""
    counts: list[int] = []
    for record in rounds:
        second = int(record["t"] + record["duration"] - first)
        counts += [0] * (second + 1 - len(counts))
        counts[second] += len(record["batch"])
    return counts


if __name__ == "__main__":
    main()
