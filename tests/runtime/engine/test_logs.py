"""Logs are beside the work: whole where the disk has room, and no end of it where not."""

import json
import logging
from pathlib import Path

import pytest

from dualpace.runtime.engine.logs import RequestLog, RoundLog
from dualpace.runtime.types import Request

FULL = Path("/dev/full")  # writes fail there as on a disk without room


@pytest.mark.parametrize("count", [0, 1, 3])
def test_requests_make_a_list(tmp_path: Path, count: int) -> None:
    file = tmp_path / "requests.json"
    log = RequestLog(str(file))
    for number in range(count):
        log.write(Request(number, prompt_len=5, max_tokens=3), 3)
    log.close()
    assert [entry["prompt_len"] for entry in json.loads(file.read_text())] == [5] * count


@pytest.mark.skipif(not FULL.exists(), reason="has no /dev/full")
def test_a_full_disk_ends_a_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    rounds, requests = RoundLog(str(FULL)), RequestLog(str(FULL))
    with caplog.at_level(logging.ERROR):
        for number in range(3000):  # more than is held back
            rounds.write({"round": number})
            requests.write(Request(number, prompt_len=5, max_tokens=3), 3)
        rounds.flush()
        requests.close()
    assert rounds.last[-1] == {"round": 2999}
    said = [record.getMessage() for record in caplog.records]
    assert sorted(said) == [
        f"runtime.{name}=/dev/full has ended, its last lines are lost: No space left on device"
        for name in ("request_log", "round_log")
    ]
