"""Serves one load under several pairs of thresholds, the fitted one among them, and sets their
throughput beside the score's own ranking.

    python scripts/bench_settings.py trace=FILE [out=FOLDER] [pairs=0:0,256:255] [requests=600]
        [stop_s=16] [skip_s=5] [timeout_s=600] [key=value ...]

Every pair is an engine of its own (`scripts/bench_engine.py`), saturated for `stop_s` seconds, of
which those after `skip_s` count. A pair that was run with the same settings is not run again, and
one that fails leaves the others. Ends with one JSON line.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dualpace.errors import ConfigError
from dualpace.options import key_values, number, sentences, whole
from dualpace.runtime.profile.fit import score_table
from dualpace.runtime.routing import Route, route
from dualpace.settings.compose import load
from dualpace.settings.measured import MeasuredProfile
from dualpace.settings.resolve import resolve

Pair = tuple[int, int]
Table = Mapping[int, Mapping[Route, float]]  # ms by size and route

BENCH = "dualpace.runtime.bench.offline"
PAIRS = "0:0,256:255,32:16,64:0,128:64"
OWN = {"out": "runs/settings", "pairs": PAIRS, "timeout_s": "600"}
LOAD = {"requests": "600", "stop_s": "16", "skip_s": "5"}
WITHIN = 0.03  # of the best, where the fitted pair should be


@dataclass(frozen=True, slots=True)
class Row:
    """What one pair gave; rates are of both engines within the window."""

    pair: Pair
    score_ms: float | None  # Equation 9, where a profile says it
    output_tokens_per_s: float
    requests_per_s: float
    cpu_iteration_ms: float
    host_share: float  # of all tokens
    p99_itl_ms: float


def main() -> None:
    options = key_values(sys.argv[1:], __doc__ or "")
    with sentences():
        result = run(options)
    print(json.dumps(result))
    sys.exit(1 if result["failed"] else 0)


def run(options: Mapping[str, str]) -> dict[str, Any]:
    """All pairs, one after another; prints a line a pair and the ranking."""
    if "trace" not in options:
        raise ConfigError("trace=FILE is missing: name the CSV file of an Azure trace.")
    if not Path(options["trace"]).is_file():
        raise ConfigError(f"trace={options['trace']} is not a file; give the trace's path.")
    whole(options, "requests", 1)
    for key in ("stop_s", "skip_s", "timeout_s"):
        number(options, key, 1)
    own = {key: options.get(key, default) for key, default in OWN.items()}
    load_keys = {"trace", *LOAD}
    settings = [f"{k}={v}" for k, v in options.items() if k not in own and k not in load_keys]
    asked = [f"{key}={options.get(key, default)}" for key, default in LOAD.items()]
    asked = [f"trace={options['trace']}", *asked, *settings]
    fitted, table = profiled(settings)
    pairs = list(dict.fromkeys([*([fitted] if fitted else []), *parse(own["pairs"])]))
    folder = Path(own["out"])
    folder.mkdir(parents=True, exist_ok=True)
    rows, failed = [], {}
    for pair in pairs:
        try:
            found = served(pair, asked, folder, float(own["timeout_s"]))
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            failed[f"{pair[0]}:{pair[1]}"] = str(error).splitlines()[-1]
            print(f"P={pair[0]} F={pair[1]} failed, see {log_file(folder, pair)}", flush=True)
            continue
        rows.append(row_of(pair, score(table, pair) if table else None, found))
        print(line_of(rows[-1], fitted), flush=True)
    result = {**verdict(rows, fitted), "failed": failed, "out": str(folder)}
    for line in ranking(rows, fitted):
        print(line)
    return result


def parse(text: str) -> list[Pair]:
    try:
        pairs = [tuple(map(int, pair.split(":"))) for pair in text.split(",")]
        return [(p, f) for p, f in pairs]
    except ValueError:
        raise ConfigError(f"pairs={text} is no list of P:F: write it as pairs={PAIRS}.") from None


def profiled(settings: Sequence[str]) -> tuple[Pair | None, Table]:
    """The pair that the profile chose, and the scores that it chose by; nothing without one."""
    name = resolve(load(*settings)).profile.name
    if name is None:
        return None, {}
    profile = MeasuredProfile.read(name)
    fitted = profile.post_attention_limit, profile.post_layer_limit
    if not profile.routing:
        return fitted, {}
    scores, sizes = profile.routing["scores_ms"], profile.routing["batch_sizes"]
    return fitted, score_table({name: scores[name.value] for name in Route}, sizes)


def score(table: Table, pair: Pair) -> float:
    """ThresholdScore in ms (Equation 9): the mean over profiled sizes as `pair` routes them."""
    return fmean(table[size][route(size, *pair)] for size in table)


def log_file(folder: Path, pair: Pair) -> Path:
    return folder / f"{pair[0]}-{pair[1]}.log"


def served(pair: Pair, asked: Sequence[str], folder: Path, timeout_s: float) -> dict[str, Any]:
    """The benchmark's result for `pair`: of an earlier run with the same settings, or a new one."""
    p, f = pair
    order = [*asked, f"assist.post_attention_limit={p}", f"assist.post_layer_limit={f}"]
    file = folder / f"{p}-{f}.json"
    if file.is_file():
        kept: dict[str, Any] = json.loads(file.read_text())
        if kept["asked"] == order:
            return dict(kept["result"])
    with log_file(folder, pair).open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", BENCH, *order, f"label={p}:{f}"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=timeout_s,
        )
        log.write(done.stdout)
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"asked": order, "result": found}))
    part.rename(file)
    return found


def row_of(pair: Pair, score_ms: float | None, found: Mapping[str, Any]) -> Row:
    tokens = found["stats"]["tokens"]
    return Row(
        pair=pair,
        score_ms=score_ms,
        output_tokens_per_s=found["window_output_tokens_per_s"],
        requests_per_s=found["window_requests_per_s"],
        cpu_iteration_ms=found.get("cpu_iteration_ms_median", 0.0),
        host_share=tokens["cpu"] / max(sum(tokens.values()), 1),
        p99_itl_ms=found["p99_itl_ms"],
    )


def line_of(row: Row, fitted: Pair | None) -> str:
    p, f = row.pair
    return (
        f"P={p} F={f}{' (fitted)' if row.pair == fitted else ''}: "
        f"{row.output_tokens_per_s:,.0f} output tokens/s, {row.requests_per_s:.2f} requests/s, "
        f"{100 * row.host_share:.1f} % on the host in iterations of {row.cpu_iteration_ms:.0f} ms, "
        f"P99 ITL {row.p99_itl_ms:.0f} ms"
    )


def ranking(rows: Sequence[Row], fitted: Pair | None) -> list[str]:
    """Markdown: from the best throughput down, the score's rank beside it."""
    ranks = score_ranks(rows)
    head = "| P, F | output tokens/s | of the best | score, ms | score's rank |"
    lines = [head, "| --- | --- | --- | --- | --- |"]
    ordered = sorted(rows, key=lambda row: -row.output_tokens_per_s)
    for row in ordered:
        p, f = row.pair
        share = row.output_tokens_per_s / max(ordered[0].output_tokens_per_s, 1e-9)
        score = "" if row.score_ms is None else f"{row.score_ms:.1f}"
        lines.append(
            f"| {p}, {f}{' (fitted)' if row.pair == fitted else ''} "
            f"| {row.output_tokens_per_s:,.0f} | {100 * share:.1f} % | {score} "
            f"| {ranks.get(row.pair, '')} |"
        )
    return lines


def score_ranks(rows: Sequence[Row]) -> dict[Pair, int]:
    """1 is the least; equal scores share a rank."""
    scores = {row.pair: row.score_ms for row in rows if row.score_ms is not None}
    return {pair: 1 + sum(s < mine for s in scores.values()) for pair, mine in scores.items()}


def verdict(rows: Sequence[Row], fitted: Pair | None) -> dict[str, Any]:
    """How close the fitted pair comes to the best."""
    best = max((row.output_tokens_per_s for row in rows), default=0.0)
    mine = next((row.output_tokens_per_s for row in rows if row.pair == fitted), None)
    share = None if mine is None else mine / max(best, 1e-9)
    return {
        "fitted": fitted,
        "fitted_of_best": share,
        "within": None if share is None else share >= 1 - WITHIN,
        "rows": [asdict(row) for row in rows],
    }
