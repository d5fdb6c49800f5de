"""What the documents say is there is there: files, links, settings and commands."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dualpace.settings.compose import conf_dir, load, register
from dualpace.settings.hardware import GIB, Hardware
from dualpace.settings.reference import document
from dualpace.settings.resolve import resolve
from tests.servers import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
COMMANDS = ("serve", "doctor", "bench", "simulate", "profile_hw", "plot")  # composed by Hydra
FAST = re.compile(r"--help|--cfg|scripts/(doctor|simulate|plot)\.py")  # of README, run for real

LAST_LINES = {  # what a script prints at the end
    "simulate": {"p99_ttft_ms", "p99_itl_ms", "p99_tpot_ms", "request_throughput"},
    "plot": {"figures"},
}


def commands(file: Path) -> list[list[str]]:
    """Words of each `python ...` line in the file's code blocks; a comment ends a line."""
    found = []
    for block in re.findall(r"```\w*\n(.*?)```|((?:\n {4}.*)+)", file.read_text(), re.DOTALL):
        text = re.sub(r"\\\n\s*", " ", "".join(block))
        for line in text.splitlines():
            if line.strip().startswith("python "):
                found.append(shlex.split(line, comments=True))
    return found


def all_commands() -> list[tuple[str, list[str]]]:
    """Of the documents, and of what `--help` prints."""
    shown = [(file.name, words) for file in DOCUMENTS for words in commands(file)]
    for file in sorted((ROOT / "conf" / "hydra" / "help").glob("*.yaml")):
        lines = re.findall(r"^ +(python .*)", file.read_text(), re.MULTILINE)
        shown += [(f"help/{file.name}", shlex.split(line)) for line in lines]
    return shown


def test_the_reference_of_settings_is_what_the_schemas_say() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == document(), "docs/configuration.md is stale: run `make docs`"


def test_there_are_commands_to_check() -> None:
    scripts = {Path(words[1]).stem for _, words in all_commands()}
    assert set(COMMANDS) <= scripts


def test_commands_name_settings_that_exist() -> None:
    register()
    wrong = []
    for name, words in all_commands():
        if words[1] == "-m":
            if importlib.util.find_spec(words[2]) is None:
                wrong.append(f"{name}: no module {words[2]}")
        elif not (ROOT / words[1]).is_file():
            wrong.append(f"{name}: no file {words[1]}")
        elif (script := Path(words[1]).stem) in COMMANDS:
            sweep = "-m" in words or "--multirun" in words
            overrides = [word for word in words[2:] if "=" in word and not word.startswith("--")]
            if sweep:  # its first point
                overrides = [re.sub(r"=([^\[{\'\"]*?),.*", r"=\1", word) for word in overrides]
            try:
                with initialize_config_dir(conf_dir(), version_base="1.3"):
                    compose(script, [word for word in overrides if "$" not in word])
            except Exception as error:
                wrong.append(f"{name}: {shlex.join(words)}: {error}")
    assert wrong == []


def test_the_readmes_commands_that_are_quick_run(tmp_path: Path) -> None:
    """In its order and one folder: the figures are drawn from what the simulation has left."""
    shown = [words for words in commands(ROOT / "README.md") if FAST.search(shlex.join(words))]
    assert len(shown) >= 5
    for words in shown:
        done = subprocess.run(
            [sys.executable, str(ROOT / words[1]), *words[2:]],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
        if Path(words[1]).stem in LAST_LINES:
            assert (
                json.loads(done.stdout.splitlines()[-1]).keys() >= LAST_LINES[Path(words[1]).stem]
            )
    assert len(list((tmp_path / "runs" / "quick").glob("*.json"))) == 4
    assert (tmp_path / "runs" / "figures" / "figure9.png").stat().st_size > 1000


def test_the_machine_of_ones_own_serves_as_it_is_shown(tmp_path: Path) -> None:
    """On a small one too."""
    text = (ROOT / "docs" / "extending.md").read_text()
    (shown,) = re.findall(r"`mine/hw/mybox.yaml`.*?```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "hw").mkdir()
    (tmp_path / "hw" / "mybox.yaml").write_text(shown)
    two = {"cores": (0, 1), "numa_nodes": (0, 0), "gpus": ()}
    small = Hardware(**two, memory_bytes=8 * GIB, fast_bf16=False)
    own = f"hydra.searchpath=['file://{tmp_path}']"
    plan = resolve(load(own, "+hw=mybox", "model=tiny_random"), small)
    assert (plan.gpu.device, plan.gpu.cores, plan.cpu.cores) == ("cpu", (0,), (1,))


def definitions(file: Path) -> set[str]:
    """Functions, classes and `Class.method`s."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {
                f"{node.name}.{inner.name}"
                for inner in ast.iter_child_nodes(node)
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_what_the_paper_is_laid_beside_is_there() -> None:
    core = ROOT / "dualpace" / "runtime" / "schedule"
    rows = re.findall(
        r"^\| [A\d].*\|$", (ROOT / "docs" / "scheduling.md").read_text(), re.MULTILINE
    )
    words = [word for row in rows for word in re.findall(r"`([^`]+)`", row)]
    files = [*core.rglob("*.py"), core.parent / "routing.py"]
    there = set().union(*map(definitions, files), (str(f.relative_to(core)) for f in files[:-1]))
    assert len(rows) > 12 and set(words) - there == {"runtime/routing.py"}


def test_the_four_trips_pass_through_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("\n## Four trips\n")[2].partition("\n## ")[0]
    trips = re.findall(r"\*\*(.+?)\*\*.*?\n\n((?:\d\. .*\n(?:   .*\n)*)+)", section)
    assert len(trips) == 4
    for name, steps in trips:
        assert 5 <= len(re.findall(r"^\d\. ", steps, re.MULTILINE)) <= 8, name
        words = re.findall(r"`([^`]+)`", steps)
        files = {word for word in words if word.endswith(".py")}
        defined = set().union(*(definitions(ROOT / "dualpace" / file) for file in files))
        named = {word for word in words if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?", word)} - files
        assert len(named) >= 5 and named <= defined, f"{name}: {named - defined}"


def leads_somewhere(file: Path, place: str, heading: str) -> bool:
    """Whether `place`, beside `file` or empty, is there, and has the heading if one is named."""
    target = file.parent / place if place else file
    return target.exists() and (not heading or heading in headings(target))


def headings(file: Path) -> set[str]:
    """As links name them."""
    found = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-") for words in found}


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))
def test_links_and_files_exist(file: Path) -> None:
    text = file.read_text()
    links = re.findall(r"\]\((?!http)([^)]+)\)", text)
    lost = [link for link in links if not leads_somewhere(file, *link.partition("#")[::2])]
    places = re.findall(r"`((?:dualpace|scripts|tests|conf|docs)/[\w./-]*[\w/])`", text)
    real = [place for place in places if not re.search("NAME|GROUP", place)]
    lost += [place for place in real if not (ROOT / place).exists()]
    assert lost == []
