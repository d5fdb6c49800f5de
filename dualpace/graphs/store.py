"""GraphStore: compiled graphs on disk, in a folder named after everything that can change the code.

The folder may be copied between equal machines and shared by concurrent starts: one lock, files
published by renaming, and a checksum of every file, so that a damaged folder is built anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dualpace.cpu.isa import cpu_flags
from dualpace.errors import ConfigError

_SOURCES = ("stages.py", "linear.py", "rope.py", "backends/inductor.py")


def environment_key() -> str:
    """A name for all that shapes the code of any graph, apart from its stage and arguments."""
    folder = Path(__file__).parent
    facts = {
        "sources": [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in _SOURCES],
        "torch": [torch.__version__, torch.version.git_version],
        "python": platform.python_version(),
        "cpu": sorted(cpu_flags()),
        "threads": torch.get_num_threads(),  # inductor writes the number into its loops
    }
    return digest(json.dumps(facts))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class GraphStore:
    """Graphs of one environment: `NAME.graph` files, and what they need, in `compiler`."""

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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the folder, and the folder whole: what was damaged is gone."""
        with open(self.folder / "lock", "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not all(self._is_whole(manifest) for manifest in self.folder.glob("*.json")):
                self.clear()
            yield

    def graph(self, name: str) -> Path | None:
        """The file of a published graph, None where there is none."""
        path = self.folder / f"{name}.graph"
        return path if path.is_file() and (self.folder / f"{name}.json").is_file() else None

    def publish(self, name: str, written: Path) -> None:
        """Take over a graph written to `written`, with what the compiler has made for it."""
        known = {file for m in self.folder.glob("*.json") for file in json.loads(m.read_text())}
        path = self.folder / f"{name}.graph"
        os.replace(written, path)
        files = [path, *(file for file in self.compiler.rglob("*.so"))]
        sums = {
            str(file.relative_to(self.folder)): _checksum(file)
            for file in files
            if file == path or str(file.relative_to(self.folder)) not in known
        }
        manifest = self.folder / f"{name}.json"
        partial = manifest.with_suffix(".partial")
        partial.write_text(json.dumps(sums))
        os.replace(partial, manifest)

    def clear(self) -> None:
        """Remove every graph."""
        for path in [*self.folder.glob("*.json"), *self.folder.glob("*.graph")]:
            path.unlink()
        shutil.rmtree(self.compiler)
        self.compiler.mkdir()

    def _is_whole(self, manifest: Path) -> bool:
        try:
            sums = json.loads(manifest.read_text())
            return all(_checksum(self.folder / file) == sum_ for file, sum_ in sums.items())
        except (OSError, ValueError):
            return False


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
