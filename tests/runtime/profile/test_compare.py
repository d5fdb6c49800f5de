"""Pairs of thresholds served one after another: what is run, what is kept, how they are ranked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualpace.errors import ConfigError
from dualpace.runtime.profile import compare

ROOT = Path(__file__).resolve().parents[3]
KEY = "policy.host_admission"
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
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("| ")][2:] == [
        "| 64, 32 | 164 | 100.0 % |  | 2 / 0 / 2 | 30.5 | 3 |",
        "| 48, 40 (fitted) | 148 | 90.2 % |  | 1 / 0 / 3 | 10.5 | 1 |",
        "| 0, 0 | 100 | 61.0 % |  | 0 / 0 / 4 | 13.0 | 2 |",
    ]
    assert printed[-2] == "The fitted pair is 9.8 % below the best, (64, 32)."
    assert "not known: turns=2" in printed[-1]
    assert by_pair(result)[0, 0]["runs"][0]["host_share"] == 0.25


@pytest.mark.parametrize(("asked", "served"), [({}, "always"), ({KEY: "profile"}, "profile")])
def test_thresholds_alone_say_who_is_assisted_unless_asked_otherwise(
    asked: dict[str, str], served: str, order: dict[str, str]
) -> None:
    compare.run(order | {"pairs": "0:0"} | asked)
    kept = [json.loads(file.read_text())["asked"] for file in Path(order["out"]).glob("*.json")]
    settings = [[s for s in each if s.startswith(KEY)] for each in kept]
    assert settings == [[f"{KEY}={served}"]] * 2


def test_turns_alternate_and_tell_how_far_a_pair_is_from_itself(
    order: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = compare.run({**order, "turns": "3"})
    assert runs(order) == [48, 0, 64, 64, 0, 48, 48, 0, 64]
    assert by_pair(result)[64, 32]["tokens_per_s"] == pytest.approx(174)
    assert by_pair(result)[64, 32]["spread"] == pytest.approx(20 / 174)
    assert result["noise"] == pytest.approx(20 / 110)  # of 0, 0
    assert result["fitted_of_best"] == pytest.approx(158 / 174)
    assert result["within"]  # 9.2 % below the best, and a pair differs from itself by more
    printed = capsys.readouterr().out.splitlines()
    assert "| 64, 32 | 174 | 100.0 % | 11.5 % | 6 / 0 / 6 | 30.5 | 3 |" in printed
    assert printed[-1] == "Two runs of one pair lie up to 18.2 % apart."


def test_more_turns_serve_only_those_that_are_new(order: dict[str, str]) -> None:
    compare.run(order)
    compare.run({**order, "turns": "2"})
    assert runs(order) == [48, 0, 64, 64, 0, 48]


def test_pairs_that_chose_the_same_routes_are_named(
    order: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = compare.run({**order, "pairs": "0:0,1:0,64:32,50:0"})
    assert by_pair(result)[50, 0]["runs"][0]["routes"] == {
        "full_cpu": 1,
        "split_final": 0,
        "fused_assist": 3,
    }
    assert result["alike_best"] == 0.75
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "(48, 40) and (50, 0) chose the same route for nearly all host batches.",
        "(0, 0) and (1, 0) chose the same route for nearly all host batches.",
    ]


def test_a_rerun_serves_only_what_is_missing_or_was_asked_otherwise(order: dict[str, str]) -> None:
    compare.run({**order, "pairs": "0:0"})
    assert runs(order) == [48, 0]
    compare.run(order)
    assert runs(order) == [48, 0, 64]
    compare.run({**order, "pairs": "0:0", "requests": "7"})
    assert runs(order) == [48, 0, 64, 48, 0]


def test_a_pair_that_fails_leaves_the_others_and_a_log(order: dict[str, str]) -> None:
    result = compare.run({**order, "pairs": "7:0,64:32", "turns": "2"})
    assert list(by_pair(result)) == [(48, 40), (64, 32)]
    assert list(result["failed"]) == ["7:0"]
    assert "out of luck" in (Path(order["out"]) / "7-0-1.log").read_text()
    assert runs(order).count(7) == 1


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
