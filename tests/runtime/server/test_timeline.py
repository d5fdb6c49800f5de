"""The start's table shows every phase of both workers."""

from dualpace.runtime.server.timeline import start_table


def test_every_phase_has_a_line_and_each_worker_a_column() -> None:
    info = {
        "gpu": {"pid": 1, "seconds": {"import": 2.0, "weights": 1.25, "pools": 0.5}},
        "cpu": {"pid": 2, "seconds": {"import": 3.0, "weights": 1.5, "novelty": 0.25}},
    }
    lines = [line.split() for line in start_table(info, 12.345)]
    assert lines == [
        ["Start,", "seconds", "GPU", "worker", "CPU", "worker"],
        ["importing", "torch", "2.0", "3.0"],
        ["loading", "weights", "1.2", "1.5"],
        ["making", "KV", "pools", "0.5", "-"],
        ["novelty", "-", "0.2"],
        ["ready", "after", "12.3"],
    ]


def test_an_engine_that_says_nothing_still_has_a_total() -> None:
    assert start_table({}, 1.0)[-1].split() == ["ready", "after", "1.0"]
