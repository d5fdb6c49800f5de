"""Results that cannot be drawn are told with the reason, and what to name differently."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.bench.config import FIGURES, PlotConfig
from dualpace.runtime.bench.metrics import RequestRecord, summarize
from dualpace.runtime.bench.plot import DRAWERS, draw, plot, why_not
from dualpace.runtime.bench.results import in_order, load_results
from dualpace.settings.compose import load


def result(**more: Any) -> dict[str, Any]:
    plain = {"policy": "dualpace", "profile": "box", "workload": "lognormal", "variant": None}
    sizes = {"num_requests": 1, "prompt_mean": 10.0, "output_mean": 2.0, "seed": 0}
    measured = summarize([RequestRecord(0, 0.0, 10, [1.0, 2.0], cpu_tokens=1)])
    return {**measured, **plain, **sizes, "rate": 2.0, **more}


def test_every_figure_that_settings_allow_has_its_drawer() -> None:
    assert sorted(DRAWERS) == [*FIGURES]


@pytest.mark.parametrize("number", sorted(DRAWERS))
def test_a_figure_that_is_left_out_says_why(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert draw([result()], [number], tmp_path) == []
    assert caplog.messages == [f"figure {number} is left out: {why_not(number, [result()])}"]


@pytest.mark.parametrize(
    ("number", "more", "reason"),
    [
        (8, {}, "none of them has its requests' lengths, which scripts/bench.py keeps"),
        (9, {}, "the workload conversation or code, and these are those of lognormal: name it w"),
        (13, {"workload": "chat"}, "it shows the workload code, and these are those of chat"),
        (10, {"variant": "TP 1"}, "and these are variants alone"),
        (11, {}, "has a variant that begins with 'TP ' or 'host ': name it with variant="),
    ],
)
def test_the_reason_names_what_is_there(number: int, more: dict[str, Any], reason: str) -> None:
    assert reason in why_not(number, [result(**more)])


def test_other_json_is_passed_over_and_what_is_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([result(), {"id": 1}, "text", {"policy": "x"}]))
    (tmp_path / "b.json").write_text("3")
    assert load_results([str(tmp_path)]) == [result()]
    (tmp_path / "c.json").write_text('{"policy": ')
    with pytest.raises(ConfigError, match=r"c\.json is not valid JSON: .*line 1 column 12"):
        load_results([str(tmp_path)])


@pytest.mark.parametrize("key", ["policy", "rate", "variant", "p99_itl_ms", "failed", "timeline"])
def test_what_has_another_type_than_in_a_result_is_passed_over_and_named(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sound = [result(rate="inf"), result(variant="TP 1", timeline=None)]
    (tmp_path / "a.json").write_text(json.dumps([*sound, result(**{key: []})]))
    with caplog.at_level(logging.INFO):
        assert load_results([str(tmp_path)]) == sound
    assert f"passed over: missing or of another type: {key}" in caplog.text


def test_paths_and_profiles_without_results(tmp_path: Path) -> None:
    for path, said in [(tmp_path / "no", "does not exist"), (tmp_path, "hold no result")]:
        with pytest.raises(ConfigError, match=said):
            load_results([str(path)])
    with pytest.raises(ConfigError, match=r"profiles=\[bx\] are in none .* which have box\.$"):
        in_order([result()], ["bx"])
    with pytest.raises(ConfigError, match=r"figures=\[3\] cannot be drawn: choose of 1, 8, 9"):
        draw([result()], [3], tmp_path)


def test_a_folder_for_figures_that_cannot_be_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="out=/proc/no cannot be written: name a folder of your"):
        plot(PlotConfig(out="/proc/no"))


def test_one_file_for_a_list_of_them_is_told_how_lists_are_written() -> None:
    with pytest.raises(ConfigError, match=r"takes list of int, written bench\.figures=\[a,b\]\.$"):
        load("bench.figures=1", root="bench")


def test_the_timeline_of_a_run_all_at_once_is_drawn_and_a_rate_that_was_not_run_is_refused(
    tmp_path: Path,
) -> None:
    line = {"t": [0.0, 1.0], "tokens": [0, 5000], "cpu_tokens": [0, 10], "pauses": []}
    run = result(rate="inf", timeline=line, cpu_resident_tokens=10, p99_itl_ms=1.0)
    assert [file.name for file in draw([run], [1], tmp_path)] == ["figure1.png", "figure1.svg"]
    assert "lognormal, all at once in the first two" in (tmp_path / "figure1.svg").read_text()
    with pytest.raises(ConfigError, match=r"timeline_rate=7 has no timeline .* choose of inf\.$"):
        draw([run], [1], tmp_path, 7.0)
