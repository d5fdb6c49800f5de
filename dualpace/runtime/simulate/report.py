"""A result for people, then as the one JSON line that scripts end with."""

import json
from typing import Any

from dualpace.runtime.bench.report import offered

ROWS = (
    ("mean_normalized_latency_s_per_token", "normalized latency, mean", "s/token", 1.0),
    ("request_throughput", "requests", "1/s", 1.0),
    ("output_throughput", "output tokens", "1/s", 1.0),
    ("p99_ttft_ms", "time to first token, P99", "s", 1e-3),
    ("median_itl_ms", "inter-token latency, P50", "ms", 1.0),
    ("p99_itl_ms", "inter-token latency, P99", "s", 1e-3),
    ("p99_tpot_ms", "time per output token, P99", "s", 1e-3),
    ("gpu_busy", "GPU busy", "", 1.0),
    ("gpu_assist", "GPU busy with assists", "", 1.0),
    ("cpu_busy", "CPU busy", "", 1.0),
    ("host_pause_max_s", "longest pause of the host tier", "s", 1.0),
    ("preemptions", "preemptions", "", 1.0),
)


def print_report(result: dict[str, Any]) -> None:
    """A table, and the result without its timeline as the last line of stdout (strict JSON)."""
    title = f"{result['policy']} on {result['profile']}"
    variant = f" ({result['variant']})" if result["variant"] else ""
    print(
        f"{title}{variant}: {result['completed']} of {result['num_requests']} requests, "
        f"{result['workload']}, {offered(result)}, "
        f"{result['prompt_mean']:.0f}/{result['output_mean']:.0f} tokens"
    )
    for key, name, unit, scale in ROWS:
        print(f"  {name:32} {result[key] * scale:10.3f} {unit}")
    share = result["cpu_resident_tokens"] / max(result["total_output_tokens"], 1)
    print(f"  {'tokens decoded in host memory':32} {100 * share:10.1f} %")
    print(f"  {'simulated in':32} {result['simulator_s']:10.1f} s of one core")
    shown = {key: value for key, value in result.items() if key != "timeline"}
    print(json.dumps(shown), flush=True)
