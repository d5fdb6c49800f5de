"""The commands as a person meets them: what is printed where, exit codes, no stray files."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dualpace.version import version
from tests.servers import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]


def run(
    script: str, *arguments: str, cwd: Path, expect: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == expect, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_help_names_the_tool_its_groups_and_defaults(tmp_path: Path) -> None:
    out = run("serve", "--help", cwd=tmp_path).stdout
    assert out.startswith("serve - an OpenAI-compatible server")
    for text in ("+hw: cpu, h200, h20x2, h20x4, rtx4090", "policy: dualpace", "port: 8000"):
        assert text in out
    assert "rows in one round" in out  # what gpu.max_batch_size means
    assert "_schema" not in out and "workload" not in out  # nothing of its insides or other tools


SIMULATION = ["simulate", "workload=fixed", "workload.num_requests=2"]  # prints while it runs


@pytest.mark.parametrize("arguments", [["serve", "--help"], ["serve", "--cfg", "job"], SIMULATION])
def test_a_reader_that_has_enough_is_no_fault(arguments: list[str], tmp_path: Path) -> None:
    """As `| head -1` is, for which the pipe's other end is closed at once here."""
    script, *words = arguments
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(writer) as stdout:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=stdout, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_sweep_tells_each_point_that_fails_and_runs_the_others(tmp_path: Path) -> None:
    words = ["workload=fixed", "workload.num_requests=2", "workload.rate=-1,2,0,3"]
    done = run("simulate", "-m", *words, "result=r.json", cwd=tmp_path, expect=1)
    told = [line for line in done.stderr.splitlines() if "point " in line]
    assert len(told) == 3 and "Error executing job" not in done.stderr
    assert "point 0: workload.rate=-1.0 must be above 0 requests/s" in told[0]
    for number, line in zip((2, 3), told[1:], strict=True):
        assert f"point {number}: result=r.json has been written by point 1 of the sweep" in line
    assert done.stderr.splitlines()[-1].endswith("for the reasons above: 0, 2, 3.")
    assert json.loads((tmp_path / "r.json").read_text())["rate"] == 2


# What the command's body finds where its shell has closed all three.
CLOSED_STREAMS = """
import os, sys
from dualpace import cli
def body(config):
    names = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    print("unheard")
    open("found", "w").write(" ".join(names))
sys.argv = ["serve.py"]
cli.command("serve", body)
"""


def test_streams_that_are_closed_are_opened_on_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, CLOSED_STREAMS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0
    assert (tmp_path / "found").read_text() == "/dev/null /dev/null /dev/null"


def test_letters_that_stdout_lacks_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    words = ["workload=fixed", "workload.num_requests=1", 'workload.label="Länge"']
    assert "1 of 1 requests, L\\xe4nge," in run("simulate", *words, cwd=tmp_path).stdout


def test_the_version_is_ours(tmp_path: Path) -> None:
    assert run("serve", "--version", cwd=tmp_path).stdout.startswith("DualPace ")


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    assert version() == "0+checkout"


def test_cfg_job_prints_the_configuration_and_leaves_no_file(tmp_path: Path) -> None:
    done = run("serve", "+hw=rtx4090", "--cfg", "job", "--resolve", cwd=tmp_path)
    assert done.stdout.startswith("hw:\n  name: rtx4090\n")
    assert "vram_gib: 24.0" in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_defaults_tree_and_search_path_are_stock(tmp_path: Path) -> None:
    assert "model: smollm2" in run("serve", "--info", "defaults-tree", cwd=tmp_path).stdout
    assert str(ROOT / "conf") in run("serve", "--info", "searchpath", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("gpu.max_bach=8", "gpu.max_bach is no setting: did you mean gpu.max_batch_size?"),
        ("gpu=2", "A group is set to one of its choices"),
        ("model.dtype=int4", "model.dtype=int4 is unknown: choose one of auto, bf16, float32."),
        ("policy=gpu_only", "policy is chosen twice, as neo and as gpu_only: keep one of them."),
        ("gpu.tp=2", "gpu.tp=2 and the model has 3 KV heads, which that does not divide"),
    ],
)
def test_mistakes_get_a_sentence_and_exit_code_1(
    argument: str, sentence: str, tmp_path: Path
) -> None:
    before = ["policy=neo"] if "policy" in argument else []
    done = run("serve", *before, argument, cwd=tmp_path, expect=1)
    assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_of_ones_own_is_used(tmp_path: Path) -> None:
    run("serve", f"hydra.run.dir={tmp_path}/mine", "gpu.tp=2", cwd=tmp_path, expect=1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_hw_files_of_ones_own_are_found(tmp_path: Path) -> None:
    (tmp_path / "hw").mkdir()
    (tmp_path / "hw" / "mybox.yaml").write_text("# @package _global_\nhw: {name: mybox}\n")
    arguments = ("--config-dir", str(tmp_path), "+hw=mybox", "--cfg", "job")
    assert "name: mybox" in run("serve", *arguments, cwd=tmp_path).stdout
    (tmp_path / "hw" / "mybox.yaml").write_text("# @package _global_\nhw: {name: mybox\n")
    said = run("serve", *arguments, cwd=tmp_path, expect=1).stderr
    assert said.startswith(f"{tmp_path}/hw/mybox.yaml, line 3, is not valid YAML: ")
    assert said.count("\n") == 1


def test_doctor_ends_with_one_json_line_that_holds_the_plan(tmp_path: Path) -> None:
    arguments = ("+hw=cpu", "model=tiny_random", "kv.gpu_blocks=32", "cpu.tp=2")
    out = run("doctor", *arguments, cwd=tmp_path).stdout
    report = json.loads(out.splitlines()[-1])
    assert report["problem"] is None
    assert report["plan"]["kv"]["gpu_blocks"] == 32
    assert set(report["ranks"]) == {"gpu 0", "cpu 0", "cpu 1"}
    assert "ready to serve" in out
    assert list(tmp_path.iterdir()) == []


def test_doctor_can_print_json_alone(tmp_path: Path) -> None:
    out = run("doctor", "--json", "+hw=cpu", "model=tiny_random", cwd=tmp_path).stdout
    assert {"problem", "plan", "tuned", "versions"} <= json.loads(out).keys()


def test_doctor_says_what_is_in_the_way(tmp_path: Path) -> None:
    out = run("doctor", "gpu.tp=2", "+hw=cpu", cwd=tmp_path, expect=1).stdout
    report = json.loads(out.splitlines()[-1])
    assert report["plan"] is None
    assert report["problem"].startswith("gpu.tp=2")


# A server that only waits stands in for the real one: this is about the entry point.
WAITING_SERVER = """
import sys, types
from dualpace import cli
server = types.ModuleType("dualpace.runtime.server")
def serve(plan):
    import time
    try:
        print("serving", plan.model.name, flush=True)
        time.sleep(600)
    finally:
        print("left", flush=True)
server.serve = serve
sys.modules["dualpace.runtime.server"] = server
sys.argv = ["serve.py", "+hw=cpu", "model=tiny_random"]
cli.serve()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_was_begun_without_a_traceback(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING_SERVER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets what it starts in the background ignore Ctrl-C, these tests included.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "serving random-tiny\n"
    process.send_signal(number)
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (128 + number, "left\n")
    assert errors.splitlines()[-1].endswith("interrupted") == (number == signal.SIGINT)
    assert "Traceback" not in errors
    assert "plan model: source=random:tiny" in errors
    assert list(tmp_path.iterdir()) == []


# Ctrl-C comes while MODULE is imported, which is on the way to the first job.
IMPORTS_AND_CTRL_C = """
import os, signal, sys

class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[0]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
sys.argv = [MODULE, "+hw=cpu", "--cfg", "job"]
from dualpace import cli
cli.serve()
"""


def ctrl_c_while_importing(
    module: str, handler: signal.Handlers, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Of a process that begins with that handler of SIGINT."""
    return subprocess.run(
        [sys.executable, "-c", f"MODULE = {module!r}\n{IMPORTS_AND_CTRL_C}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )


@pytest.mark.parametrize("module", ["dualpace.command", "hydra._internal.hydra"])
def test_ctrl_c_before_a_command_begins_is_one_line_too(module: str, tmp_path: Path) -> None:
    done = ctrl_c_while_importing(module, signal.SIG_DFL, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_job_that_a_shell_lets_ignore_ctrl_c_ignores_it(tmp_path: Path) -> None:
    done = ctrl_c_while_importing("hydra", signal.SIG_IGN, tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "port: 8000" in done.stdout
