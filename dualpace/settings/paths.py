"""Files and folders that settings name: made absolute, and tried before anything is started."""

import os
import tempfile
from pathlib import Path

from dualpace.errors import ConfigError


def folder(key: str, name: str | None) -> str | None:
    """`name` as an absolute path that is a writable folder or can become one."""
    if name is None:
        return None
    path = Path(name).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not _is_writable(existing):
        raise ConfigError(f"{key}={name} cannot be written: name a folder of your own.")
    return str(path)


def _is_writable(folder: Path) -> bool:
    """Tried, not asked: permissions say nothing of file systems that take no files."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def default_cache() -> str:
    """The user's cache folder; where there is none to write in, one for as long as /tmp lasts."""
    try:
        found = folder("compile.cache_dir", "~/.cache/dualpace")
    except (ConfigError, RuntimeError):  # a read-only or missing home
        found = str(Path(tempfile.gettempdir()) / f"dualpace-{os.getuid()}")
    assert found is not None
    return found


def log_file(key: str, name: str | None) -> str | None:
    """`name` as an absolute path into a folder that exists and can be written."""
    if name is None:
        return None
    path = Path(name).expanduser().absolute()
    if path.is_dir() or not _is_writable(path.parent):
        raise ConfigError(f"{key}={name} cannot be written: name a file in a writable folder.")
    return str(path)
