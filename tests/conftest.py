"""Fixtures that several packages' tests share: the real SmolLM2, ours and the reference.

Imports are inside the fixtures, so that tests without torch stay fast.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dualpace.settings.hardware import probe_gpus

if TYPE_CHECKING:
    from dualpace.graphs.executor import Stages
    from dualpace.graphs.source import Source
    from dualpace.graphs.tokenizer import Tokenizer

pytest_plugins = ("tests.times",)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads that wait for each other crawl when other work shares the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton looks when it is imported, which tests of the runtime do too: without a GPU its kernels run
# in its interpreter, on the CPU, at tiny sizes.
if not probe_gpus():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup() -> None:
    """What a test draws without a seed of its own is what it drew the last time."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> Source:
    """SmolLM2-135M-Instruct as packaged."""
    from dualpace.graphs.source import resolve_source

    return resolve_source("smollm2")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Source) -> Tokenizer:
    from dualpace.graphs.tokenizer import load_tokenizer

    return load_tokenizer(smollm2)


@pytest.fixture(scope="session")
def smollm2_stages(smollm2: Source) -> Stages:
    """Its stages, eager, float32."""
    import torch

    from dualpace.graphs.cache import GraphCache
    from dualpace.graphs.load import load_weights

    return GraphCache().build(smollm2.spec, load_weights(smollm2, torch.float32))


@pytest.fixture(scope="session")
def hf_smollm2_folder(smollm2: Source, request: pytest.FixtureRequest) -> Path:
    """SmolLM2 as the reference converts it: half a minute's work, so pytest's cache keeps it."""
    assert smollm2.path is not None and request.config.cache is not None
    cache = request.config.cache.mkdir(f"smollm2-{smollm2.path.stat().st_size}")
    folder = cache / "converted"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process converts, others wait for it
        if not folder.is_dir():
            partial = cache / f"partial-{os.getpid()}"
            convert_gguf(smollm2.path, partial)
            partial.rename(folder)
    return folder


def convert_gguf(path: Path, folder: Path) -> None:
    """Let the reference read a GGUF file, and save what it made of it."""
    import functools

    import gguf
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The reference calls these again and again, seconds each time.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # its weights are plain by now
    model.config.architectures = [type(model).__name__]  # a GGUF does not name it
    model.config.save_pretrained(folder)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})


@pytest.fixture(scope="session")
def hf_smollm2(hf_smollm2_folder: Path) -> Any:
    """The reference implementation of SmolLM2 in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(hf_smollm2_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def hf_smollm2_tokenizer(hf_smollm2_folder: Path) -> Any:
    """The reference's tokenizer of SmolLM2."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(hf_smollm2_folder)
