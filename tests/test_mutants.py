"""The tests of envelope, rounds and routing notice every change of the code that they test."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_mutant_is_caught() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants"], cwd=ROOT, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("ALIVE")] == [], done.stdout
    assert done.returncode == 0, done.stderr
    assert json.loads(lines[-1])["caught"] > 300
