"""docs/configuration.md, made of the schemas and conf/: `python -m dualpace.settings.reference`
prints it, `make docs` writes it, and a test compares.
"""

from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from dualpace.runtime.bench.config import LoadConfig, PlotConfig, WorkloadConfig
from dualpace.runtime.profile.config import SweepConfig
from dualpace.runtime.simulate.config import ProfileConfig
from dualpace.settings.compose import conf_dir
from dualpace.settings.help import shown
from dualpace.settings.meaning import meanings, summary
from dualpace.settings.schema import VARIANTS, BenchConfig, ServeConfig, SimulateConfig

_HEAD = """\
# Configuration

Made from the schemas by `make docs`; change a meaning where its field is, in the component's
`config.py`.

A setting is `group.key=value` on the command line, as in `gpu.max_batch_size=64`, and the same in
YAML. `group=choice` takes a file of `conf/GROUP/`. `+hw=NAME`, before all others, states the
machine; `+experiment=NAME`, after all others, is a variation for `scripts/bench.py`. Later words
win over earlier ones: schema, group file, hw file, experiment, command line. `null` means that
nobody has decided: a profile does, or the start does from what it finds. `--help` shows the same
with the values that a command line results in, `--cfg job --resolve` the values alone; a start logs
what it has decided, group by group, as `plan ...`.

From Python: `LLM("smollm2", policy="gpu_only", kv={"gpu_blocks": 64})`.
"""
# Order and titles of sections; a schema without a group of its own lies in the root.
_SERVE = "Serving"
_TOOLS: tuple[tuple[str, str, type], ...] = (
    ("Workloads (`scripts/bench.py`, `scripts/simulate.py`)", "workload", WorkloadConfig),
    ("Load (`scripts/bench.py`)", "bench", LoadConfig),
    ("Profiling (`scripts/profile_hw.py`)", "profile", SweepConfig),
    ("Simulated machines (`scripts/simulate.py`)", "simulated", ProfileConfig),
    ("Figures (`scripts/plot.py`)", "", PlotConfig),
)


def document() -> str:
    parts = [_HEAD, f"## {_SERVE}\n\n`scripts/serve.py`, `scripts/doctor.py` and `LLM`.\n"]
    for name, meaning in meanings(ServeConfig).items():
        schema = type(meaning.default) if is_dataclass(meaning.default) else None
        parts += _section(f"### {name}", name, schema)
    for title, group, schema in _TOOLS:
        parts += _section(f"## {title}", group, schema)
        if schema is LoadConfig:
            parts.append(_table((key, meanings(BenchConfig)[key]) for key in ("variant", "result")))
        if schema is ProfileConfig:
            parts.append(_table([("window", meanings(SimulateConfig)["window"])]))
    return "\n".join(parts)


def _section(title: str, group: str, schema: type | None) -> Iterator[str]:
    """Heading, meaning, choices and keys of a group; then those of its variants."""
    variants = [kind for (of, _), kind in VARIANTS.items() if of == group and kind is not schema]
    yield f"{title}\n"
    if schema is not None:
        yield f"{summary(schema)}\n"
    yield from _choices(group, {_name_of(kind): kind for kind in variants})
    if schema is not None:
        yield _table(_rows(schema, group))
    for kind in variants:
        base = meanings(schema) if schema is not None else {}
        own = [(key, m) for key, m in _rows(kind, group) if key.rpartition(".")[2] not in base]
        if own := [row for row in own if not row[0].endswith(".name")]:
            yield f"With `{group}={_name_of(kind)}`:\n"
            yield _table(own)


def _name_of(kind: type) -> str:
    return str(meanings(kind)["name"].default)


def _choices(group: str, variants: dict[str, type]) -> Iterator[str]:
    """A table of `group=choice`, said by the file's first comment, its schema or its content."""
    files = sorted((Path(conf_dir()) / group).glob("*.yaml")) if group else []
    if not files:
        return
    sign = "+" if group == "hw" else ""
    lines = ["| choice | |", "| --- | --- |"]
    for file in files:
        text = _first_comment(file)
        if not text and file.stem in variants:
            text = summary(variants[file.stem])
        content = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        text = text or f"`{' '.join(content)}`"
        lines.append(f"| `{sign}{group}={file.stem}` | {_cell(text)} |")
    yield "\n".join(lines) + "\n"


def _first_comment(file: Path) -> str:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]
    return lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""


def _rows(schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Full key and meaning of each setting, nested groups in their places."""
    for name, meaning in meanings(schema).items():
        key = f"{prefix}.{name}".strip(".")
        if is_dataclass(meaning.default):
            yield from _rows(type(meaning.default), key)
        else:
            yield key, meaning


def _table(rows: Any) -> str:
    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, meaning in rows:
        default = "to be given" if meaning.default == MISSING else f"`{shown(meaning.default)}`"
        lines.append(f"| `{key}` | {meaning.type} | {default} | {_cell(meaning.text)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(document(), end="")
