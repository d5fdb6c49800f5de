"""What the doctor shows people: within a terminal's 80 columns, the verdict last."""

import json
import os
from pathlib import Path

import pytest

from dualpace import doctor
from tests.tiny_settings import settings

CANDIDATES = {
    "inductor-packed": 2e-3,
    "generated-tiles": 1e-3,
    "eager": 225.630e-3,
    "packed": 3e-3,
    "inductor": 4e-3,
    "tiles": 5e-3,
}


def note(folder: Path, seconds: dict[str, float], age_s: float) -> None:
    folder.mkdir(parents=True)
    values = {"model": "Tiny 2x64 bf16, threads: 16", "stage": "post_layer_greedy", "bucket": 256}
    file = folder / "some.note"
    file.write_text(json.dumps({**values, "seconds": seconds}))
    os.utime(file, (1e9 - age_s, 1e9 - age_s))


def test_all_candidates_are_shown_within_80_columns_and_the_latest_notes_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    note(tmp_path / "graphs/a", CANDIDATES, age_s=0)
    note(tmp_path / "graphs/b", {"eager": 777e-6}, age_s=60)  # of an older version
    assert doctor.run(settings(f"compile.cache_dir={tmp_path}"))
    *lines, report = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    table = " ".join(" ".join(lines).split())
    assert "post_layer_greedy 256 generated-tiles 1000 inductor-packed 2000," in table
    assert "eager 225630" in table and "777" not in table
    assert lines[-1].strip() == "verdict ready to serve"
    assert json.loads(report)["problem"] is None


def test_a_problem_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are no markup."""
    assert not doctor.run(settings("model.source=random:[bold]"))
    *lines, report = capsys.readouterr().out.splitlines()
    assert "[bold]" in " ".join(lines) and "[bold]" in json.loads(report)["problem"]
