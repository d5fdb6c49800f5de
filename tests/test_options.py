"""The measuring scripts without settings of Hydra's: help, and words that cannot be read."""

import subprocess
import sys
from pathlib import Path

import pytest

from dualpace.options import key_values
from tests.servers import PATIENCE_S

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def test_words_are_keys_and_values_and_the_last_holds() -> None:
    words = ["+hw=cpu", "a=1", "model.source=x=y", "a="]
    assert key_values(words, "") == {"+hw": "cpu", "a": "", "model.source": "x=y"}


@pytest.mark.parametrize("word", ["trace", "-q", "--trace=FILE", "trace FILE"])
def test_another_word_is_told(word: str) -> None:
    with pytest.raises(SystemExit, match=f"^{word} cannot be read: options are written key=value"):
        key_values(["a=1", word], "")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_the_callers_own(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        key_values(["a", flag], "\nWhat it does.\n")
    assert caught.value.code == 0
    assert capsys.readouterr().out == "What it does.\n"


@pytest.mark.parametrize("script", ["bench_engine", "bench_settings"])
def test_a_load_without_its_trace_asks_for_it(script: str) -> None:
    command = [sys.executable, str(SCRIPTS / f"{script}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert done.stderr.startswith("trace=FILE is") and done.stderr.count("\n") == 1
