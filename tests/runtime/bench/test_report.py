"""In which words the reports of both benchmarks say how requests came."""

from typing import Any

import pytest

from dualpace.runtime.bench.report import offered


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"rate": "inf", "arrival": "trace"}, "as in the trace"),
        ({"rate": 2.5, "arrival": "trace"}, "2.5 requests/s offered"),
        ({"rate": 2.5, "arrival": "exponential"}, "2.5 requests/s offered"),
        ({"rate": "inf", "arrival": "exponential"}, "all at once"),
        ({"rate": "inf", "arrival": "trace", "max_concurrency": 8}, "8 at a time"),
    ],
)
def test_how_requests_came(result: dict[str, Any], words: str) -> None:
    assert offered(result) == words
