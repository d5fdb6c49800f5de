"""Replays a round log and verifies what must hold of it, whoever wrote it: a live run or a
simulation.

    python -m dualpace.runtime.schedule.check ROUNDS.jsonl [--requests REQUESTS.json] [--declared]

Knows the format and the rules, not the scheduler. Prints the first problems and a last line of
JSON; exits with 1 if there was any.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dualpace.errors import ConfigError

Record = dict[str, Any]
LISTS = (
    "batch",
    "prefill_gpu",
    "prefill_cpu",
    "swap_out",
    "swap_in",
    "marked",
    "finished",
    "preempted",
)
COUNTS = ("waiting", "gpu_running", "cpu_waiting", "cpu_running")
TIME_TOLERANCE_S = 1e-6


def check_log(
    rounds: Sequence[Record], requests: Sequence[Record] = (), declared: bool = False
) -> list[str]:
    """All problems found, as sentences; empty if the log is sound.

    `requests` is the request log: with it, token counts and arrival order are checked too.
    `declared` asserts Equation 2 in every record instead of those that admit something. A file
    may hold one run only.
    """
    problems: list[str] = []
    for record in rounds:
        problems += check_record(record, declared)
    if not problems:
        for engine in ("gpu", "cpu"):
            problems += check_pace([r for r in rounds if r["engine"] == engine])
        problems += check_residency(rounds)
        if requests:
            problems += check_requests(rounds, requests)
    return problems


def check_record(record: Record, declared: bool) -> Iterator[str]:
    """One record by itself: fields, both capacities, Equation 2, lists that exclude each other."""
    where = f"{record.get('engine')} round {record.get('round')}"
    missing = {
        "t",
        "duration",
        "gpu_blocks",
        "host_blocks",
        "route",
        *LISTS,
        *COUNTS,
    } - record.keys()
    if missing:
        yield f"{where}: no {', '.join(sorted(missing))}"
        return
    gpu, host = record["gpu_blocks"], record["host_blocks"]
    if not 0 <= gpu["used"] <= gpu["capacity"]:
        yield f"{where}: {gpu['used']} of {gpu['capacity']} GPU blocks used"
    if not 0 <= host["used"] + host["planned"] <= host["capacity"]:
        yield f"{where}: {host['used']} + {host['planned']} of {host['capacity']} host blocks used"
    admits = record["prefill_cpu"] or record["swap_out"]
    envelope = host["used"] + host["planned"] + host["growth"] + host["migration"]
    if (admits or declared) and envelope > host["capacity"]:
        yield f"{where}: Equation 2 is broken, {envelope} > {host['capacity']}"
    if record["swap_out"] and record["swap_in"]:
        yield f"{where}: swaps in and out at once"
    if any(record[key] < 0 for key in COUNTS) or record["duration"] < 0:
        yield f"{where}: a negative count or duration"
    for key in LISTS:
        if len(set(record[key])) != len(record[key]):
            yield f"{where}: an id stands twice in {key}"
    if not set(record["finished"]) <= set(record["batch"]):
        yield f"{where}: finished without being in the batch"
    if set(record["batch"]) & set(record["swap_out"]):
        yield f"{where}: runs what it swaps out"
    if record["engine"] == "cpu" and any(record[k] for k in LISTS[1:6]):
        yield f"{where}: the CPU engine prefills or moves"


def check_pace(rounds: Sequence[Record]) -> Iterator[str]:
    """Rounds of one engine are numbered upwards and never overlap."""
    for before, after in pairwise(rounds):
        where = f"{after['engine']} round {after['round']}"
        if after["round"] <= before["round"]:
            yield f"{where}: follows round {before['round']}"
        if after["t"] < before["t"] + before["duration"] - TIME_TOLERANCE_S:
            yield f"{where}: starts before round {before['round']} ends"


def events(rounds: Sequence[Record]) -> list[tuple[float, int, str, int, Record]]:
    """What happened to whom, in the order it took effect: (time, tie-break, what, id, record).

    A swap-out is committed after the GPU round before has ended, and the CPU may run the request
    before the GPU's batch starts; everything else takes effect when the batch starts, its
    finishes when it ends.
    """
    result: list[tuple[float, int, str, int, Record]] = []
    gpu_end = float("-inf")
    for record in rounds:
        t, is_gpu = record["t"], record["engine"] == "gpu"
        end = t + record["duration"]
        early = gpu_end if is_gpu else t
        result += [(early, 1, "preempted", i, record) for i in record["preempted"]]
        result += [(early, 2, "swap_out", i, record) for i in record["swap_out"]]
        for tie, key in ((3, "swap_in"), (4, "prefill_gpu"), (5, "prefill_cpu")):
            result += [(t, tie, key, i, record) for i in record[key]]
        result += [(t, 6, "batch", i, record) for i in record["batch"]]
        result += [(end, 0, "finished", i, record) for i in record["finished"]]
        if is_gpu:
            gpu_end = end
    return sorted(result, key=lambda event: event[:2])


def check_residency(rounds: Sequence[Record]) -> Iterator[str]:
    """Single ownership: each id lives in one tier at a time, runs only there, and ends once.

    Host rows that a GPU round runs in lockstep (neo) are the one exception: they stay on the host.
    """
    home: dict[int, str] = {}
    needs = {"swap_out": "gpu", "swap_in": "cpu", "prefill_cpu": "none", "preempted": "gpu or cpu"}
    becomes = {
        "swap_out": "cpu", "swap_in": "gpu", "prefill_gpu": "gpu", "prefill_cpu": "cpu",
        "preempted": "none", "finished": "ended",
    }  # fmt: skip
    for _, _, what, request, record in events(rounds):
        where = f"{record['engine']} round {record['round']}: request {request}"
        now = home.get(request, "none")
        if now == "ended":
            yield f"{where} has ended, then {what}"
        elif what == "batch":
            if now == "none" or (record["engine"] == "cpu" and now != "cpu"):
                yield f"{where} runs, but its KV is {'nowhere' if now == 'none' else 'on the GPU'}"
        elif what == "prefill_gpu" and now == "cpu":
            yield f"{where} is prefilled while on the host"
        elif what in needs and now not in needs[what] and what != "preempted":
            yield f"{where} is {now}-resident, then {what}"
        home[request] = becomes.get(what, now)


def check_requests(rounds: Sequence[Record], requests: Iterable[Record]) -> Iterator[str]:
    """Everyone got exactly the tokens that the request log says, and first prefills keep arrival
    order.
    """
    runs: dict[int, int] = defaultdict(int)
    prefills: dict[int, int] = defaultdict(int)
    first: dict[int, int] = {}
    finished: set[int] = set()
    for number, record in enumerate(rounds):
        finished.update(record["finished"])
        for request in record["batch"]:
            runs[request] += 1
        for request in record["prefill_gpu"] + record["prefill_cpu"]:
            prefills[request] += 1
            first.setdefault(request, number)
    latest, order = -1, sorted(requests, key=lambda entry: entry["arrival"])
    for entry in order:
        request, outputs = entry["id"], entry["output_len"]
        if entry.get("refused"):
            if runs[request]:
                yield f"request {request} was refused and ran"
            continue
        if outputs > entry["max_tokens"]:
            yield f"request {request} has {outputs} tokens of at most {entry['max_tokens']}"
        if not entry.get("cancelled"):
            if request not in finished:
                yield f"request {request} never finished"
            if runs[request] < outputs or (prefills[request] == 1 and runs[request] != outputs):
                yield f"request {request} ran {runs[request]} times for {outputs} tokens"
        if request in first:
            if first[request] < latest:
                yield f"request {request} was prefilled before an earlier one"
            latest = max(latest, first[request])


def read_lines(path: Path) -> list[Record]:
    """A round log: one JSON object a line. ConfigError for a file that is none."""
    lines = [line for line in _text(path).splitlines() if line.strip()]
    return [_object(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


def read_list(path: Path) -> list[Record]:
    """A request log: a JSON list of objects. ConfigError for a file that is none."""
    entries = _parsed(_text(path))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path} is no request log: that is one JSON list of objects.")
    return entries


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no log: it is no UTF-8 text.") from None


def _object(line: str, where: str) -> Record:
    record = _parsed(line)
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is no round: a round log has one JSON object a line.")
    return record


def _parsed(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Verify the invariants of a round log.")
    parser.add_argument("rounds", type=Path, help="round log, JSON lines")
    parser.add_argument("--requests", type=Path, help="request log, a JSON list")
    parser.add_argument(
        "--declared", action="store_true", help="estimates are exact: Equation 2 holds always"
    )
    arguments = parser.parse_args()
    try:
        rounds = read_lines(arguments.rounds)
        requests = read_list(arguments.requests) if arguments.requests else []
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    problems = check_log(rounds, requests, arguments.declared)
    for problem in problems[:20]:
        print(problem)
    print(json.dumps({"rounds": len(rounds), "requests": len(requests), "problems": len(problems)}))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
