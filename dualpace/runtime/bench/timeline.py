"""Tokens over time, and pauses of the host tier: Figure 1's first two panels, from a round log or
from what clients saw. Knows the round log's record, not who wrote it."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dualpace.runtime.bench.metrics import RequestRecord

POINTS = 1000
LONG_PAUSE_S = 1.0


def from_records(records: Sequence[RequestRecord], points: int = POINTS) -> dict[str, Any]:
    """All tokens as clients saw them; where they were made is not known."""
    times = sorted(t for r in records if r.completed for t in r.token_times_s)
    return sampled([(t, 1, 0) for t in times], points) | {"pauses": []}


def from_round_log(
    path: Path, first_id: int, first_token_s: float, points: int = POINTS
) -> dict[str, Any]:
    """The timeline of requests from `first_id` on (those before belong to another run), whose first
    token the clients saw `first_token_s` seconds after the start of the run."""
    with path.open(encoding="utf-8") as file:
        whole = [json.loads(line) for line in file if line.endswith("\n")]
    rounds = sorted(whole, key=lambda r: float(r["t"] + r["duration"]))
    rows, pauses = advance(rounds, first_id)
    if not rows:
        return sampled([], points) | {"pauses": []}
    shift = first_token_s - rows[0][0]
    moved = [(t + shift, tokens, on_host) for t, tokens, on_host in rows]
    return sampled(moved, points) | {"pauses": [(a + shift, b + shift) for a, b in pauses]}


def advance(
    rounds: Iterable[dict[str, Any]], first_id: int
) -> tuple[list[tuple[float, int, int]], list[tuple[float, float]]]:
    """(end of round, tokens, of them host-resident) a round, and the long pauses (from, to).

    A request is host-resident from its Prefill-to-CPU or swap-out to its swap-in, preemption or
    end; its first token is the GPU's in any case.
    """
    rounds = list(rounds)
    chunks = earlier_chunks(rounds)
    host: set[int] = set()
    rows: list[tuple[float, int, int]] = []
    pauses: list[tuple[float, float]] = []
    since_s: float | None = None
    for number, record in enumerate(rounds):
        now = float(record["t"] + record["duration"])
        host -= {*record["swap_in"], *record["preempted"], *record["prefill_gpu"]}
        batch = [i for i in record["batch"] if i >= first_id and (number, i) not in chunks]
        on_host = sum(i in host for i in batch)
        host |= {i for i in (*record["prefill_cpu"], *record["swap_out"]) if i >= first_id}
        host -= set(record["finished"])
        if batch:
            rows.append((now, len(batch), on_host))
        if since_s is not None and (on_host or not host):
            if now - since_s > LONG_PAUSE_S:
                pauses.append((since_s, now))
            since_s = None
        if host and since_s is None:
            since_s = now
    return rows, pauses


def earlier_chunks(rounds: Sequence[dict[str, Any]]) -> set[tuple[int, int]]:
    """(place of the round, request) of chunks of a prompt that another one follows: no token."""
    chunks: set[tuple[int, int]] = set()
    follows: dict[int, bool] = {}  # request -> its next row is a chunk
    for number in range(len(rounds) - 1, -1, -1):
        prefilled = set(rounds[number]["prefill_gpu"])
        for request in rounds[number]["batch"]:
            is_chunk = request in prefilled
            if is_chunk and follows.get(request, False):
                chunks.add((number, request))
            follows[request] = is_chunk
    return chunks


def sampled(rows: Sequence[tuple[float, int, int]], points: int) -> dict[str, list[Any]]:
    """Cumulative sums of (time, tokens, host-resident tokens) at evenly spaced times (s)."""
    if not rows:
        return {"t": [], "tokens": [], "cpu_tokens": []}
    end = rows[-1][0]
    marks = [end * i / points for i in range(points)] + [end]
    result: dict[str, list[Any]] = {"t": marks, "tokens": [], "cpu_tokens": []}
    place = tokens = on_host = 0
    for mark in marks:
        while place < len(rows) and rows[place][0] <= mark:
            tokens += rows[place][1]
            on_host += rows[place][2]
            place += 1
        result["tokens"].append(tokens)
        result["cpu_tokens"].append(on_host)
    return result
