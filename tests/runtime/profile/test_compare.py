"""Pairs of thresholds served one after another: what is run, what is kept, how they are ranked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualpace.errors import ConfigError
from dualpace.runtime.profile import compare

ROOT = Path(__file__).resolve().parents[3]
ROUTING = {  # ms at 1 and 64 rows: Full-CPU best alone, Fused-Assist best for many
    "batch_sizes": [1, 64],
    "scores_ms": {"full_cpu": [1.0, 90.0], "split_final": [2.0, 60.0], "fused_assist": [6.0, 20.0]},
}


@pytest.fixture
def order(
    tmp_path: Path, write_profile: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Options of a run with a profile that chose (48, 40), whose benchmark is a fake."""
    monkeypatch.setattr(compare, "BENCH", "tests.runtime.profile.fake_bench")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "trace").touch()
    profile = Path(write_profile())
    profile.write_text(profile.read_text() + yaml.safe_dump({"routing": ROUTING}))
    return {
        "trace": str(tmp_path / "trace"),
        "out": str(tmp_path / "out"),
        "pairs": "0:0,64:32",
        "model": "tiny_random",
        "gpu.device": "cpu",
        "hw.profile": str(profile),
    }


def runs(order: dict[str, str]) -> list[int]:
    return [int(line) for line in Path(order["trace"]).read_text().split()]


def by_pair(result: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    return {row["pair"]: row for row in result["rows"]}


def test_the_fitted_pair_is_set_beside_the_others_and_the_scores(
    order: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = compare.run(order)
    rows = by_pair(result)
    assert list(rows) == [(48, 40), (0, 0), (64, 32)]
    assert [row["score_ms"] for row in rows.values()] == pytest.approx([10.5, 13.0, 30.5])
    assert result["fitted"] == (48, 40)
    assert result["fitted_of_best"] == pytest.approx(148 / 164)
    assert result["within"] is False and not result["failed"]
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert table == [
        "| 64, 32 | 164 | 100.0 % | 30.5 | 3 |",
        "| 48, 40 (fitted) | 148 | 90.2 % | 10.5 | 1 |",
        "| 0, 0 | 100 | 61.0 % | 13.0 | 2 |",
    ]
    assert by_pair(result)[0, 0]["host_share"] == 0.25


def test_a_rerun_serves_only_what_is_missing_or_was_asked_otherwise(order: dict[str, str]) -> None:
    compare.run({**order, "pairs": "0:0"})
    assert runs(order) == [48, 0]
    compare.run(order)
    assert runs(order) == [48, 0, 64]
    compare.run({**order, "pairs": "0:0", "requests": "7"})
    assert runs(order) == [48, 0, 64, 48, 0]


def test_a_pair_that_fails_leaves_the_others_and_a_log(order: dict[str, str]) -> None:
    result = compare.run({**order, "pairs": "7:0,64:32"})
    assert list(by_pair(result)) == [(48, 40), (64, 32)]
    assert list(result["failed"]) == ["7:0"]
    assert "out of luck" in (Path(order["out"]) / "7-0.log").read_text()


def test_without_a_profile_pairs_are_ranked_by_throughput_alone(order: dict[str, str]) -> None:
    result = compare.run({**order, "hw.profile": "null"})
    assert result["fitted"] is result["within"] is None
    assert [row["score_ms"] for row in result["rows"]] == [None, None]


def test_mistakes_are_one_sentence(order: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"pairs=3 is no list of P:F"):
        compare.run({**order, "pairs": "3"})
    order["trace"] += "s"
    with pytest.raises(ConfigError, match=r"traces is not a file; give the trace's path\."):
        compare.run(order)
    del order["trace"]
    with pytest.raises(ConfigError, match="trace=FILE is missing"):
        compare.run(order)
