"""GraphStore: compiled graphs on disk, in a folder named after everything that can change the code.

The folder may be copied between equal machines and shared by concurrent starts: graphs are made in
folders of their own and published by renaming, two processes never make the same one, and a graph
whose files fail their checksums is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dualpace.cpu.isa import cpu_flags
from dualpace.errors import ConfigError

_ABANDONED_S = 3600.0
_SOURCES = (
    "stages.py",
    "linear.py",
    "rope.py",
    "backends/inductor.py",
    "backends/lowering.py",
    "backends/generated.py",
)


def environment_key(threads: int | None = None) -> str:
    """A name for all that shapes the code of any graph, apart from its stage and arguments.

    threads: what graphs will run on, torch's own number if not given.
    """
    folder = Path(__file__).parent
    facts = {
        "sources": [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in _SOURCES],
        "torch": [torch.__version__, torch.version.git_version],
        "python": platform.python_version(),
        "cpu": sorted(cpu_flags()),
        # Inductor writes the number into its loops.
        "threads": threads or torch.get_num_threads(),
    }
    return digest(json.dumps(facts))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class GraphStore:
    """Graphs of one environment: `NAME.graph`, its checksums in `NAME.json`, and the libraries of
    kernels of all of them in `compiler`.
    """

    def __init__(self, cache_dir: Path, key: str) -> None:
        self.folder = cache_dir / "graphs" / key
        self.compiler = self.folder / "compiler"
        try:
            self.compiler.mkdir(parents=True, exist_ok=True)
            (self.folder / "lock").touch()
        except OSError as error:
            raise ConfigError(
                f"compile.cache_dir={cache_dir} cannot be written ({error.strerror}); give a "
                "folder of your own"
            ) from error

    def check(self) -> None:
        """Drop every graph of which a file is missing or damaged, and word that all is done."""
        with self._lock("lock"):
            for workshop in self.folder.glob("making-*"):  # of builders that were killed
                if time.time() - workshop.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(workshop, ignore_errors=True)
            for path in self.folder.glob("*.graph"):
                damaged = self._damaged(path.with_suffix(".json"))
                if damaged is None or damaged:
                    for file in (path, *(damaged or ())):
                        file.unlink(missing_ok=True)
                    for note in self.folder.glob("done-*.note"):
                        note.unlink()

    def graph(self, name: str) -> Path | None:
        """The file of a published graph, None where there is none."""
        path = self.folder / f"{name}.graph"
        return path if path.is_file() else None

    def publish(self, name: str, make: Callable[[Path, Path], None]) -> bool:
        """Have graph `name`, by `make(file to write, empty folder for libraries)` if need be.

        False, without waiting, where another process is making it.
        """
        try:
            with self._lock(f"{name}.lock", wait=False):
                if self.graph(name) is None:
                    workshop = Path(tempfile.mkdtemp(prefix="making-", dir=self.folder))
                    try:
                        self._make(name, make, workshop)
                    finally:
                        shutil.rmtree(workshop, ignore_errors=True)
        except BlockingIOError:
            return False
        return True

    def note(self, name: str) -> dict[str, Any] | None:
        """What `write_note` wrote, None where there is nothing readable."""
        try:
            found = json.loads((self.folder / f"{name}.note").read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write_note(self, name: str, facts: dict[str, Any]) -> None:
        self._write(self.folder / f"{name}.note", json.dumps(facts))

    def notes(self) -> dict[str, dict[str, Any]]:
        """Every readable note by its name."""
        names = sorted(path.stem for path in self.folder.glob("*.note"))
        return {name: note for name in names if (note := self.note(name)) is not None}

    @contextmanager
    def alone(self, name: str, wait: bool = True) -> Iterator[None]:
        """Waits until no other process is in this section for `name`, or raises BlockingIOError."""
        with self._lock(f"{name}.lock", wait):
            yield

    def _make(self, name: str, make: Callable[[Path, Path], None], workshop: Path) -> None:
        compiler, written = workshop / "compiler", workshop / "graph"
        compiler.mkdir()
        make(written, compiler)
        sums = {f"{name}.graph": _checksum(written)}
        for file in [path for path in compiler.rglob("*") if path.is_file()]:
            place = self.compiler / file.relative_to(compiler)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():  # graphs may share a kernel
                os.replace(file, place)
            sums[str(place.relative_to(self.folder))] = _checksum(place)
        self._write(self.folder / f"{name}.json", json.dumps(sums))
        os.replace(written, self.folder / f"{name}.graph")  # last: from now on it is there

    def _write(self, path: Path, text: str) -> None:
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(text)
        os.replace(partial, path)

    def _damaged(self, manifest: Path) -> list[Path] | None:
        """Files that are not what the manifest says; None for a manifest that cannot be read."""
        try:
            sums = json.loads(manifest.read_text())
            files = {self.folder / name: expected for name, expected in sums.items()}
        except (OSError, ValueError, AttributeError):
            return None
        return [
            file
            for file, expected in files.items()
            if not file.is_file() or _checksum(file) != expected
        ]

    @contextmanager
    def _lock(self, name: str, wait: bool = True) -> Iterator[None]:
        with open(self.folder / name, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
