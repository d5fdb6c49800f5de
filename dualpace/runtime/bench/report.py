"""A measurement for people, then as the one JSON line that scripts end with; a sweep's figures."""

import json
import sys
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

ROWS = (
    ("mean_normalized_latency_s_per_token", "normalized latency, mean", "s/token", 1.0),
    ("request_throughput", "requests", "1/s", 1.0),
    ("request_goodput", "requests within all targets", "1/s", 1.0),
    ("output_throughput", "output tokens", "1/s", 1.0),
    ("median_ttft_ms", "time to first token, P50", "ms", 1.0),
    ("p99_ttft_ms", "time to first token, P99", "ms", 1.0),
    ("median_itl_ms", "inter-token latency, P50", "ms", 1.0),
    ("p99_itl_ms", "inter-token latency, P99", "ms", 1.0),
    ("p99_tpot_ms", "time per output token, P99", "ms", 1.0),
    ("gpu_busy", "GPU engine busy", "", 1.0),
    ("cpu_busy", "CPU engine busy", "", 1.0),
    ("preemptions", "preemptions", "", 1.0),
    ("client_lag_p99_ms", "client late, P99", "ms", 1.0),
    ("client_cores", "client's share of a core", "", 1.0),
)

_LONG = ("timeline", "input_lens", "output_lens")  # for figures, in the result's file alone


def print_report(result: dict[str, Any]) -> None:
    """A table, and the result without its timeline as the last line of stdout (strict JSON)."""
    variant = f" ({result['variant']})" if result["variant"] else ""
    print(
        f"{result['policy']} on {result['profile']}{variant}: {result['completed']} of "
        f"{result['num_requests']} requests, {result['workload']}, {offered(result)}, "
        f"{result['prompt_mean']:.0f}/{result['output_mean']:.0f} tokens"
    )
    for key, name, unit, scale in ROWS:
        if result.get(key) is not None:
            print(f"  {name:32} {result[key] * scale:10.3f} {unit}")
    share = result["cpu_resident_tokens"] / max(result["total_output_tokens"], 1)
    print(f"  {'tokens of the CPU engine':32} {100 * share:10.1f} %")
    shown = {key: value for key, value in result.items() if key not in _LONG}
    print(json.dumps(shown), flush=True)


def offered(result: dict[str, Any]) -> str:
    """In which words requests came; `rate` is "inf" where none was asked for."""
    if result.get("max_concurrency"):
        return f"{result['max_concurrency']} at a time"
    if result["rate"] != "inf":
        return f"{result['rate']} requests/s offered"
    return "as in the trace" if result.get("arrival") == "trace" else "all at once"


class DrawFigures(Callback):
    """After each run of a sweep, which may be cut before the next: the figures that `bench.figures`
    lists, the page and the table of sustainable rates, from all results in `bench.out`. Stdout
    still ends with a result."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        out, figures = config.bench.out, list(config.bench.figures)
        if out is None or not Path(out).is_dir() or not (figures or config.bench.page):
            return
        # matplotlib takes seconds, and no run needs it.
        from dualpace.runtime.bench.page import write_page
        from dualpace.runtime.bench.plot import draw
        from dualpace.runtime.bench.results import load_results
        from dualpace.runtime.bench.sustain import table

        results = load_results([out])
        if not results:
            return
        files = draw(results, figures, Path(out))
        if config.bench.page is not None:
            write_page(results, files, Path(out) / config.bench.page, config.bench.title)
        # Not by logging: at the end of a sweep that is Hydra's own, which writes to stdout.
        print("\n".join(table(results)), file=sys.stderr)
        print("figures:", ", ".join(map(str, files)), file=sys.stderr)
