"""Files and folders that settings name: made absolute, and tried before anything is started."""

import os
import stat
import tempfile
from pathlib import Path

from dualpace.errors import ConfigError


def folder(key: str, name: str | None) -> str | None:
    """`name` as an absolute path that is a writable folder or can become one."""
    if name is None:
        return None
    if not name:
        raise ConfigError(f"{key} is empty: name a folder of your own or leave it out.")
    path = Path(name).expanduser().absolute()
    if not _can_become(path):
        raise ConfigError(f"{key}={name} cannot be written: name a folder of your own.")
    return str(path)


def check_output(key: str, name: str | None) -> None:
    """Raises ConfigError unless `name` is a file, or can become one, in a folder that can."""
    if name is None:
        return
    path = Path(name).expanduser().absolute()
    if path.is_dir() or not _can_become(path.parent):
        raise ConfigError(f"{key}={name} cannot be written: name a file in a writable folder.")


def file_name(key: str, name: str | None, place: str = "it lies where the figures do") -> None:
    """Raises ConfigError unless `name` is that of a file alone, without folders."""
    if name is not None and (name in ("", ".", "..") or "/" in name):
        raise ConfigError(f"{key}={name} is no name of a file: leave folders out, {place}.")


def _can_become(folder: Path) -> bool:
    return _is_writable(next(each for each in (folder, *folder.parents) if each.exists()))


def _is_writable(folder: Path) -> bool:
    """Tried, not asked: permissions say nothing of file systems that take no files."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def default_cache() -> str:
    """The user's cache folder; where there is none to write in, one for as long as /tmp lasts."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        found = folder("compile.cache_dir", f"{base}/dualpace")
        assert found is not None
        return found
    except (ConfigError, RuntimeError):  # a read-only or missing home
        return _own(Path(tempfile.gettempdir()) / f"dualpace-{os.getuid()}")


def _own(path: Path) -> str:
    """`path` as a folder that nobody else can write: what lies in it is run."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:  # no folder, or none to be had
        raise ConfigError(_no_cache(f"{path} cannot be made ({error.strerror})")) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(_no_cache(f"{path} may be written by others"))
    return str(path)


def _no_cache(why: str) -> str:
    return (
        f"compile.cache_dir is not set, no home can be written and {why}: set compile.cache_dir to "
        f"a folder of your own."
    )


def log_file(key: str, name: str | None) -> str | None:
    """`name` as an absolute path into a folder that exists and can be written."""
    if name is None:
        return None
    path = Path(name).expanduser().absolute()
    if path.is_dir() or not _is_writable(path.parent):
        raise ConfigError(f"{key}={name} cannot be written: name a file in a writable folder.")
    return str(path)
