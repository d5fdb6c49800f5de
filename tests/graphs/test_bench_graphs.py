"""The arithmetic of the benchmarks of graphs."""

from __future__ import annotations

import pytest

from dualpace.graphs.bench_start import compile_seconds, overheads
from dualpace.graphs.buckets import PIECE_S
from dualpace.graphs.table import Entry, StageTable, Unpadded

LOG = """\
[12:00:00][INFO] Start, seconds             GPU worker    CPU worker
[12:00:00][INFO]   importing torch                  2.1           2.0
[12:00:00][INFO]   building stages                  1.5           0.5
[12:00:00][INFO]   products                        10.0             -
[12:00:00][INFO]   making KV pools                  0.1             -
[12:00:00][INFO]   ready after                      9.8
""".splitlines()


def test_the_compile_part_is_read_from_a_time_line() -> None:
    assert compile_seconds(LOG) == {"GPU": 11.5, "CPU": 0.5, "ready": 9.8}


def test_overhead_is_padding_pieces_and_calls() -> None:
    padded, exact = (Entry(lambda *_: None, [], pads, n) for pads, n in ((True, "c"), (False, "e")))
    times = {("mlp", 1): {"c": 1.0, "e": 2.0}, ("mlp", 3): {"c": 3.0, "e": 4.0}}
    costs = {1: 1.0, 3: 2.9}
    cut = StageTable({1: padded, 3: padded}, costs)
    # 2 rows: 2 at best; as 1 + 1 here, and in two calls.
    shares = [PIECE_S, 2 * PIECE_S / 2, PIECE_S / 3]
    assert overheads({"mlp": cut}, times)["mlp"] == pytest.approx(sum(shares) / 3)
    unpadded = Unpadded({1: exact, 3: exact}, {1: 2.0, 3: 4.0})
    whole = StageTable({3: padded}, {3: 3.0}, unpadded)
    # 1 row for 2 instead of 1 and 2 rows for 3 instead of 2, both as they are.
    shares = [1 + PIECE_S, (1 + PIECE_S) / 2, PIECE_S / 3]
    assert overheads({"mlp": whole}, times)["mlp"] == pytest.approx(sum(shares) / 3)
