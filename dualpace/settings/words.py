"""The words of a command line, looked at before Hydra reads them. Knows no setting by name."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from dualpace.errors import ConfigError


def own_folders(words: Sequence[str]) -> list[Path]:
    """Folders of settings that `--config-dir` adds."""
    parts = [part for word in words for part in (word.split("=") if word[:1] == "-" else [word])]
    found = [name for flag, name in pairwise(parts) if flag in ("--config-dir", "-cd")]
    return [Path(name).absolute() for name in found]


def check_choices(words: Iterable[str], folders: Sequence[Path]) -> None:
    """ConfigError for a group, a folder in one of `folders`, that is chosen twice, of which Hydra
    would take the last without a word, and for a chosen file that is no text."""
    groups = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
    chosen: dict[str, str] = {}
    for word in words:
        name, sign, choice = word.lstrip("+").partition("=")
        if not sign or name not in groups:
            continue
        if name in chosen:
            raise ConfigError(
                f"{name} is chosen twice, as {chosen[name]} and as {choice}: keep one of them."
            )
        chosen[name] = choice
        for folder in folders:
            _check_text(folder / name / f"{choice.removesuffix('.yaml')}.yaml")


def _check_text(file: Path) -> None:
    try:
        lines = file.read_bytes().splitlines() if file.is_file() else []
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            byte = line[error.start]
            raise ConfigError(
                f"{file}, line {number}, is not UTF-8 text: it has the byte {byte:#04x}."
            ) from None
