"""GGUF files: every family's tensors, quantizations, RoPE factors and tokenizers, written anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from dualpace.errors import ConfigError
from dualpace.graphs.gguf_file import GGUFFile
from dualpace.graphs.gguf_spec import spec_from_gguf
from dualpace.graphs.gguf_tensors import GGUFTensors
from dualpace.graphs.load import load_weights
from dualpace.graphs.models.family import GGUF_NAMES, HF_NAMES
from dualpace.graphs.source import Source, resolve_source
from dualpace.graphs.tokenizer import load_tokenizer
from tests.graphs.reference import (
    SIZES,
    assert_close,
    hf_logits,
    load_stages,
    run_logits,
    save_tiny,
)

IDS = list(range(5, 45))
KINDS = gguf.GGMLQuantizationType


def permute(rows: Tensor, heads: int) -> Tensor:
    """Rows as llama.cpp's converter writes them: the two rotary halves of a head interleaved."""
    halves = rows.view(heads, 2, rows.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model: Any, arch: str, **metadata: Any) -> None:
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in metadata.pop("extra", {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    if "factors" in metadata:
        writer.add_tensor("rope_freqs.weight", metadata["factors"].numpy())
    names = {ours: HF_NAMES.top[key] for key, ours in GGUF_NAMES.top.items()}
    for layer in range(config.num_hidden_layers):
        for key, parts in GGUF_NAMES.layer.items():
            for ours, theirs in zip(parts, HF_NAMES.layer[key], strict=True):
                names[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    for ours, theirs in names.items():
        if theirs not in state:
            continue
        tensor = state[theirs]
        if arch == "llama" and ours.endswith("attn_q.weight"):
            tensor = permute(tensor, config.num_attention_heads)
        if arch == "llama" and ours.endswith("attn_k.weight"):
            tensor = permute(tensor, config.num_key_value_heads)
        writer.add_tensor(ours, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
}


@pytest.mark.parametrize("arch", CONFIGS)
def test_logits_equal_the_reference(arch: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS[arch])
    write_gguf(tmp_path / "model.gguf", model, arch)
    stages = load_stages(str(tmp_path / "model.gguf"))
    assert_close(run_logits(stages, 3, IDS), hf_logits(model, IDS), 1e-5)


def test_rope_factors_stand_for_llama3_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = save_tiny(tmp_path, transformers.LlamaConfig(**SIZES, rope_parameters=scaling))
    plain = 1 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq
    write_gguf(tmp_path / "model.gguf", model, "llama", factors=factors.float())
    stages = load_stages(str(tmp_path / "model.gguf"))
    assert_close(run_logits(stages, 3, IDS), hf_logits(model, IDS))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling yarn"),
        ({"llama.attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"llama.expert_count": 8.0}, "mixture of experts"),
        ({"split.count": 3.0}, "is one of 3.* parts of a model: join them first"),
    ],
)
def test_unsupported_files_are_refused(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["llama"])
    write_gguf(tmp_path / "model.gguf", model, "llama", extra=extra)
    with pytest.raises(ConfigError, match=message):
        resolve_source(str(tmp_path / "model.gguf"))


def test_other_architectures_and_damaged_files_are_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["llama"])
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "gemma2")
    with pytest.raises(ConfigError, match="architecture gemma2 is not supported"):
        resolve_source(str(path))
    write_gguf(path, model, "llama")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"token_embd.weight", b"other_embd.weight"))
    with pytest.raises(ConfigError, match=r"has no token_embd\.weight; it is not a complete"):
        resolve_source(str(path))
    for cut in (100, len(data) - 5000):
        path.write_bytes(data[:cut])
        with pytest.raises(ConfigError, match="cut short"):
            load_stages(str(path))
    write_gguf(path, model, "llama")
    with pytest.raises(ConfigError, match=r"model\.gguf has no tokenizer; it is not a complete"):
        load_tokenizer(resolve_source(str(path)))
    write_gguf(path, model, "llama", extra={"tokenizer.ggml.model": "gpt2"})
    with pytest.raises(ConfigError, match=r"model\.gguf has no tokenizer that can be read"):
        load_tokenizer(resolve_source(str(path)))
    source = resolve_source("smollm2")
    assert source.file is not None
    source.file.metadata["tokenizer.chat_template"] = ["a"]
    with pytest.raises(ConfigError, match="has a chat template that is no text"):
        load_tokenizer(source)
    path.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        resolve_source(str(path))


def test_metadata_that_no_model_has_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", save_tiny(tmp_path, CONFIGS["llama"]), "llama")
    file = GGUFFile(tmp_path / "model.gguf")
    assert spec_from_gguf(file).num_q_heads == 4
    sound = dict(file.metadata)
    sizes = ("attention.head_count", "attention.head_count_kv", "attention.key_length")
    for key in (*sizes, "embedding_length", "block_count", "context_length"):
        for value in (0, -1, 1.5, "four", [4, 4]):
            file.metadata = sound | {f"llama.{key}": value}
            with pytest.raises(
                ConfigError, match=rf"llama\.{key}=.*a whole number from 1 on belongs"
            ):
                spec_from_gguf(file)
    for key in ("llama.attention.layer_norm_rms_epsilon", "llama.expert_count", "split.count"):
        file.metadata = sound | {key: []}
        with pytest.raises(ConfigError, match=rf"has {key}=\[\], where a number belongs"):
            spec_from_gguf(file)
    file.metadata = sound | {"tokenizer.ggml.eos_token_id": [2]}
    with pytest.raises(ConfigError, match=r"eos_token_id=\[2\], where a token id belongs"):
        spec_from_gguf(file)
    file.metadata = sound | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 999}
    assert spec_from_gguf(file).eos_token_ids == (2,)  # the other is beyond the vocabulary
    file.metadata = sound | {"llama.rope.scaling.type": "linear"}
    with pytest.raises(ConfigError, match=r"has no llama\.rope\.scaling\.factor"):
        spec_from_gguf(file)
    file.metadata["llama.rope.scaling.factor"] = 0.0
    with pytest.raises(ConfigError, match=r"RoPE factor is 0\.0 and must be a number above 0"):
        spec_from_gguf(file)


def test_tensors_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["llama"])
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", factors=torch.ones(8))
    file = GGUFFile(path)
    name, factors = "blk.1.attn_q.weight", file.tensors["rope_freqs.weight"]
    sound = file.tensors[name]
    for odd, message in (
        (replace(sound, ggml_type=999), "a format that the installed gguf package cannot read"),
        (replace(sound, ggml_type=int(KINDS.I8)), r"cannot read \(.*I8"),
        (replace(sound, ggml_type=int(KINDS.Q6_K)), r"of shape \[64, 64\] in blocks of 256 values"),
        (replace(sound, shape=()), r"has blk\.1\.attn_q\.weight of shape \[\]"),
        (replace(sound, shape=(2**40, 64)), "is cut short; fetch it again"),
    ):
        file.tensors[name] = odd
        with pytest.raises(ConfigError, match=message):
            load_weights(Source("gguf", path, spec_from_gguf(file), "", file), torch.float32)
    file.tensors["rope_freqs.weight"] = replace(factors, shape=(7,))
    with pytest.raises(ConfigError, match=r"of shape \[7\], where 8 float32 belong, one a freq"):
        spec_from_gguf(file)
    file.tensors["rope_freqs.weight"] = replace(factors, offset=len(file.data))
    with pytest.raises(ConfigError, match="is cut short"):
        spec_from_gguf(file)
    file.tensors["rope_freqs.weight"] = factors
    file.tensors["token_embd.weight"] = replace(sound, shape=(2**40, 64))
    with pytest.raises(ConfigError, match="vocabulary is 1099511627776 and must be a whole number"):
        spec_from_gguf(file)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q6_K"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_tensors_equal_the_package(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((600, 512)).astype(np.float32)
    if kind == "Q6_K":  # the package only reads this one
        data = np.random.default_rng(1).integers(0, 255, (600, 420), dtype=np.uint8)
        data[:, 208:210], data[:, 418:420] = 0x11, 0x22  # scales that are finite
    else:
        data = gguf.quants.quantize(values, KINDS[kind])
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", data, raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GGUFTensors(GGUFFile(tmp_path / "t.gguf"))
    out = torch.empty(tensors.shape("t"), dtype=dtype)
    tensors.read_into("t", out, range(600), range(512))
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(data, KINDS[kind]))).to(dtype)
    assert torch.equal(out, expected)
    for rows, columns in ((range(7, 300), range(512)), (range(99, 101), range(250, 391))):
        part = torch.empty(len(rows), len(columns), dtype=dtype)
        tensors.read_into("t", part, rows, columns)
        assert torch.equal(part, expected[rows.start : rows.stop, columns.start : columns.stop])
