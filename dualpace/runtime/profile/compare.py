"""Serves one load under several pairs of thresholds, the fitted one among them, and sets their
throughput beside the score's own ranking.

    python scripts/bench_settings.py trace=FILE [out=FOLDER] [pairs=0:0,256:255] [turns=1]
        [requests=600] [stop_s=30] [skip_s=6] [timeout_s=600] [key=value ...]

Every run is an engine of its own (`scripts/bench_engine.py`), saturated for `stop_s` seconds, of
which those after `skip_s` count. Each pair is served `turns` times, every other turn from the last
pair to the first: two runs of one pair tell what of a difference is noise. A run that was made with
the same settings is not made again, and a pair that fails leaves the others. Ends with one JSON
line.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dualpace.errors import ConfigError
from dualpace.options import key_values, number, sentences, whole
from dualpace.runtime.profile.fit import score_table
from dualpace.runtime.profile.ranking import Pair, Row, Run, closing, table, verdict
from dualpace.runtime.routing import Route, route
from dualpace.settings.compose import load
from dualpace.settings.measured import MeasuredProfile
from dualpace.settings.resolve import resolve

Scores = Mapping[int, Mapping[Route, float]]  # ms by size and route

BENCH = "dualpace.runtime.bench.offline"
ADMISSION = "policy.host_admission="
PAIRS = "0:0,256:255,32:16,64:0,128:64"
OWN = {"out": "runs/settings", "pairs": PAIRS, "turns": "1", "timeout_s": "600"}
LOAD = {"requests": "600", "stop_s": "30", "skip_s": "6"}


def main() -> None:
    options = key_values(sys.argv[1:], __doc__ or "")
    with sentences():
        result = run(options)
    print(json.dumps(result))
    sys.exit(1 if result["failed"] else 0)


def run(options: Mapping[str, str]) -> dict[str, Any]:
    """All runs, one after another; prints a line a run, the ranking and what it says."""
    if "trace" not in options:
        raise ConfigError("trace=FILE is missing: name the CSV file of an Azure trace.")
    if not Path(options["trace"]).is_file():
        raise ConfigError(f"trace={options['trace']} is not a file; give the trace's path.")
    turns = whole(options, "turns", 1)
    whole(options, "requests", 1)
    for key in ("stop_s", "skip_s", "timeout_s"):
        number(options, key, 1)
    own = {key: options.get(key, default) for key, default in OWN.items()}
    load_keys = {"trace", *LOAD}
    settings = [f"{k}={v}" for k, v in options.items() if k not in own and k not in load_keys]
    asked = [f"{key}={options.get(key, default)}" for key, default in LOAD.items()]
    asked = [f"trace={options['trace']}", *asked, *settings]
    fitted, scores = profiled(settings)
    pairs = list(dict.fromkeys([*([fitted] if fitted else []), *parse(own["pairs"])]))
    folder = Path(own["out"])
    folder.mkdir(parents=True, exist_ok=True)
    runs, failed = contest(pairs, turns, asked, folder, float(own["timeout_s"]))
    rows = [
        Row(pair, score(scores, pair) if scores else None, tuple(runs[pair]))
        for pair in pairs
        if runs[pair]
    ]
    for line in [*table(rows, fitted), *closing(rows, fitted)]:
        print(line)
    return {**verdict(rows, fitted), "failed": failed, "out": str(folder)}


def contest(
    pairs: Sequence[Pair], turns: int, asked: Sequence[str], folder: Path, timeout_s: float
) -> tuple[dict[Pair, list[Run]], dict[str, str]]:
    """The runs of each pair, and why pairs failed, which are not tried again in later turns."""
    runs: dict[Pair, list[Run]] = {pair: [] for pair in pairs}
    failed: dict[str, str] = {}
    for turn in range(1, turns + 1):
        for pair in pairs if turn % 2 else reversed(pairs):
            p, f = pair
            if f"{p}:{f}" in failed:
                continue
            try:
                found = served(pair, turn, asked, folder, timeout_s)
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                failed[f"{p}:{f}"] = str(error).splitlines()[-1]
                print(f"P={p} F={f} failed, see {stem(folder, pair, turn)}.log", flush=True)
                continue
            runs[pair].append(Run.of(turn, found))
            print(f"P={p} F={f} turn {turn}: {runs[pair][-1]}", flush=True)
    return runs, failed


def parse(text: str) -> list[Pair]:
    try:
        pairs = [tuple(map(int, pair.split(":"))) for pair in text.split(",")]
        return [(p, f) for p, f in pairs]
    except ValueError:
        raise ConfigError(f"pairs={text} is no list of P:F: write it as pairs={PAIRS}.") from None


def profiled(settings: Sequence[str]) -> tuple[Pair | None, Scores]:
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


def score(scores: Scores, pair: Pair) -> float:
    """ThresholdScore in ms (Equation 9): the mean over profiled sizes as `pair` routes them."""
    return fmean(scores[size][route(size, *pair)] for size in scores)


def stem(folder: Path, pair: Pair, turn: int) -> Path:
    """Of a run's files."""
    return folder / f"{pair[0]}-{pair[1]}-{turn}"


def served(
    pair: Pair, turn: int, asked: Sequence[str], folder: Path, timeout_s: float
) -> dict[str, Any]:
    """The benchmark's result: of this turn's earlier run with the same settings, or a new one."""
    p, f = pair
    order = [*asked, f"assist.post_attention_limit={p}", f"assist.post_layer_limit={f}"]
    if not any(setting.startswith(ADMISSION) for setting in asked):
        order.insert(0, f"{ADMISSION}always")  # else prices decide over most batches
    file = stem(folder, pair, turn).with_suffix(".json")
    if file.is_file():
        kept: dict[str, Any] = json.loads(file.read_text())
        if kept["asked"] == order:
            return dict(kept["result"])
    with file.with_suffix(".log").open("w") as log:
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
