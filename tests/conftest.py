"""Fixtures that several packages' tests share: the real SmolLM2, ours and the reference.

Imports are inside the fixtures, so that tests without torch stay fast.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dualpace.graphs.executor import Stages
    from dualpace.graphs.source import Source
    from dualpace.graphs.tokenizer import Tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")


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
def gguf_reader() -> None:
    """The reference parses a file several times, seconds each: let it do so once."""
    import functools

    import gguf

    gguf.GGUFReader = functools.cache(gguf.GGUFReader)


@pytest.fixture(scope="session")
def hf_smollm2(smollm2: Source, gguf_reader: None) -> Any:
    """The reference implementation of it in float32; takes some ten seconds, once a session."""
    import torch
    from transformers import AutoModelForCausalLM

    assert smollm2.path is not None
    return AutoModelForCausalLM.from_pretrained(
        smollm2.path.parent, gguf_file=smollm2.path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="session")
def hf_smollm2_tokenizer(smollm2: Source, gguf_reader: None) -> Any:
    """The reference's tokenizer, read from the same file."""
    from transformers import AutoTokenizer

    assert smollm2.path is not None
    return AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
