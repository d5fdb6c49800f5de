"""The measuring scripts without settings of Hydra's: help, and words that cannot be read."""

import subprocess
import sys
from pathlib import Path

import pytest

from dualpace.errors import ConfigError
from dualpace.options import key_values, number, sentences, several, whole
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


def test_a_key_that_a_script_does_not_have_is_told_with_those_it_has() -> None:
    assert key_values(["a=1"], "", ("a", "b")) == {"a": "1"}
    with pytest.raises(SystemExit, match=r"^c is no option: choose of a, b\.$"):
        key_values(["a=1", "c=2"], "", ("a", "b"))


def test_values_are_read_or_refused_by_their_keys() -> None:
    given = {"n": "3", "s": "0.5", "parts": "x,y"}
    assert (whole(given, "n", 9), whole(given, "m", 9)) == (3, 9)
    assert (number(given, "s", 2), number(given, "t", 2)) == (0.5, 2)
    assert several(given, "parts", ("x", "y", "z")) == ["x", "y"]
    assert several({}, "parts", ("x", "y", "z")) == ["x", "y", "z"]
    for value in ("0", "-1", "1.5", "abc", ""):
        with pytest.raises(ConfigError, match=rf"^n={value} is no whole number from 1 on\.$"):
            whole({"n": value}, "n", 9)
    for value in ("-1", "nan", "inf", "abc", ""):
        with pytest.raises(ConfigError, match=rf"^s={value} is no number from 0 on\.$"):
            number({"s": value}, "s", 9)
    with pytest.raises(ConfigError, match=r"^parts=w is unknown: choose of x, y\.$"):
        several({"parts": "x,w"}, "parts", ("x", "y"))


def test_what_a_user_can_mend_ends_a_script_as_a_sentence() -> None:
    with pytest.raises(SystemExit, match=r"^n=0 is wrong\.$"), sentences():
        raise ConfigError("n=0 is wrong.")


def test_ctrl_c_ends_a_script_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, sentences():
        raise KeyboardInterrupt
    assert caught.value.code == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("script", ["bench_engine", "bench_settings"])
def test_a_load_without_its_trace_asks_for_it(script: str) -> None:
    command = [sys.executable, str(SCRIPTS / f"{script}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert done.stderr.startswith("trace=FILE is") and done.stderr.count("\n") == 1


def test_the_gpu_script_has_its_help_where_triton_is_not() -> None:
    code = (
        "import runpy, sys; sys.modules['triton'] = None; sys.argv = ['bench_gpu.py', '--help'];"
        f"runpy.run_path({str(SCRIPTS / 'bench_gpu.py')!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.startswith("Checks and times the GPU library") and not done.stderr
