"""Settings and hardware to plan: what `auto` becomes, and the sentence for what cannot be."""

from dataclasses import replace
from pathlib import Path

import pytest

from dualpace.errors import ConfigError
from dualpace.graphs.shapes import SHAPES
from dualpace.runtime.config import NEO_LAUNCH_MS
from dualpace.runtime.plan import AssistPlan, Plan
from dualpace.settings.compose import load
from dualpace.settings.hardware import GIB, Gpu, Hardware
from dualpace.settings.resolve import resolve
from tests.tiny_settings import settings

SMALL = Hardware(cores=(0, 1), numa_nodes=(0, 0), memory_bytes=16 * GIB, fast_bf16=False, gpus=())
BIG = Hardware(
    cores=tuple(range(16)),
    numa_nodes=(0,) * 16,
    memory_bytes=120 * GIB,
    fast_bf16=True,
    gpus=(Gpu(name="H200", memory_bytes=140 * GIB),),
)


def plan(*overrides: str, on: Hardware = SMALL) -> Plan:
    return resolve(settings(*overrides), on)


def test_two_cores_give_each_worker_one_of_its_own() -> None:
    made = plan()
    assert (made.gpu.cores, made.cpu.cores) == ((0,), (1,))
    assert (made.gpu.threads, made.cpu.threads) == (1, 1)


def test_a_stand_in_that_serves_alone_may_have_all_cores() -> None:
    """By name: figures compare policies on the same accelerator."""
    made = plan("policy=gpu_only", "gpu.threads=2")
    assert (made.gpu.cores, made.gpu.threads) == ((0, 1), 2)
    assert plan("policy=gpu_only").gpu.cores == (0,)
    with pytest.raises(ConfigError, match=r"gpu\.threads=2 is above 1, the number of"):
        plan("policy=neo", "gpu.threads=2")
    with pytest.raises(ConfigError, match=r"gpu\.threads=3 is above 2, the number of"):
        plan("policy=gpu_only", "gpu.threads=3")
    with pytest.raises(ConfigError, match=r"gpu\.threads=2 is above 1, the number of"):
        plan("policy=gpu_only", "gpu.threads=2", "hw.cores=1")


def test_without_bf16_instructions_auto_is_float32() -> None:
    assert plan().model.dtype == "float32"
    assert plan(on=replace(SMALL, fast_bf16=True)).model.dtype == "bf16"
    assert plan("model.dtype=bf16").model.dtype == "bf16"
    assert plan(on=replace(BIG, fast_bf16=False)).model.dtype == "bf16"  # the GPU's choice


def test_auto_takes_a_gpu_where_one_is() -> None:
    assert plan().gpu.device == "cpu"
    assert plan(on=BIG).gpu.device == "cuda"
    assert plan("gpu.device=cpu", on=BIG).gpu.device == "cpu"


def test_blocks_as_told_are_usable_ones_and_the_pools_have_a_scratch_block_more() -> None:
    made = plan("kv.gpu_blocks=8", "kv.host_blocks=100")
    assert (made.kv.gpu_blocks, made.kv.host_blocks) == (8, 100)


def test_pools_in_gib() -> None:
    made = plan("kv.gpu_gib=0.25", "kv.host_gib=1")
    assert made.kv.gpu_blocks == GIB // 4 // made.kv.bytes_per_block
    assert made.kv.host_blocks == GIB // made.kv.bytes_per_block


def test_the_stand_in_has_a_small_pool_and_a_modest_host_pool() -> None:
    assert plan().kv.host_blocks == 8192
    made = resolve(settings("model.source=random:smollm2-135m"), SMALL)
    assert made.kv.gpu_blocks == 256
    assert made.kv.host_blocks == 2 * GIB // made.kv.bytes_per_block
    assert made.model.max_context == 8192


def test_a_gpu_gets_what_its_memory_leaves_beside_the_weights() -> None:
    made = resolve(settings("model.source=random:llama-3.1-8b"), BIG)
    weights = SHAPES["llama-3.1-8b"].num_parameters() * 2
    pool = made.kv.gpu_pool_blocks * made.kv.bytes_per_block
    assert 0.8 * 140 * GIB - weights < pool + GIB < 0.91 * 140 * GIB - weights
    assert made.kv.host_pool_blocks * made.kv.bytes_per_block < 120 * GIB - weights


def test_context_is_bounded_by_model_larger_tier_and_what_one_prefill_can_redo() -> None:
    assert plan("kv.gpu_blocks=16", "kv.host_blocks=0").model.max_context == 256
    assert plan("kv.gpu_blocks=16", "kv.host_blocks=64").model.max_context == 1024
    assert plan("kv.gpu_blocks=1", "kv.host_blocks=4096").model.max_context == 2048  # the model
    hard = ("gpu.token_limit=256", "gpu.max_batched_tokens=512")
    assert plan("kv.gpu_blocks=16", "kv.host_blocks=64", *hard).model.max_context == 512
    assert plan("kv.gpu_blocks=64", "kv.host_blocks=64", *hard).model.max_context == 1024
    assert plan("model.max_context=100").model.max_context == 100


def test_without_a_host_tier_only_the_gpu_pool_counts() -> None:
    made = resolve(load("model=tiny_random", "policy=gpu_only", "kv.gpu_blocks=16"), SMALL)
    assert made.kv.host_blocks == 0
    assert made.model.max_context == 256
    assert made.policy.name == "gpu_only"


def test_where_requests_decode_on_the_host_with_the_gpu_alone_only_its_pool_counts() -> None:
    made = resolve(load("model=tiny_random", "policy=neo", "kv.gpu_blocks=16"), SMALL)
    assert made.kv.host_blocks > 16 and made.model.max_context == 256


def test_neo_counts_its_launches_where_a_device_launches() -> None:
    """As it does by default in a simulation, so that both decide by one rule."""

    def launch_ms(*overrides: str, on: Hardware) -> object:
        return dict(plan("policy=neo", *overrides, on=on).policy.options).get("launch_ms")

    assert launch_ms(on=BIG) == NEO_LAUNCH_MS == 0.8
    assert launch_ms(on=SMALL) is None
    assert launch_ms("policy.launch_ms=0", on=BIG) == 0
    assert launch_ms("policy.launch_ms=0.3", on=SMALL) == 0.3
    assert "launch_ms" not in dict(plan("policy=dualpace", on=BIG).policy.options)


def test_the_hard_limit_follows_the_soft_one() -> None:
    assert plan().gpu.max_batched_tokens == 8192
    assert plan("gpu.token_limit=16384").gpu.max_batched_tokens == 16384


def test_without_thresholds_every_cpu_batch_runs_full_cpu() -> None:
    made = plan("cpu.max_batch_size=32").assist
    assert made == AssistPlan(post_attention_limit=33, post_layer_limit=32, mode="stream")
    told = plan("assist.post_attention_limit=0", "assist.post_layer_limit=0").assist
    assert told == AssistPlan(post_attention_limit=0, post_layer_limit=0, mode="stream")
    assert plan("gpu.tp=2").assist.mode == "boundary"


def test_log_files_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan("runtime.round_log=rounds.jsonl").runtime.round_log == f"{tmp_path}/rounds.jsonl"


def test_the_model_has_the_name_of_its_source_unless_told() -> None:
    assert plan().model.name == "random-tiny"
    assert plan("model.name=mine").model.name == "mine"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("hw.name=rtx4090 hw.gpus=1", "hw.name=rtx4090 states 1 GPU and this machine shows none"),
        ("hw.name=h20x2 hw.gpus=2", "hw.name=h20x2 states 2 GPUs and this machine shows none"),
        ("hw.cores=12", "hw.cores=12 and only 2 cores may be used here: set hw.cores=2"),
        ("gpu.device=cuda", "gpu.device=cuda and no GPU"),
        ("gpu.tp=4", "gpu.tp=4 and the model has 2 KV heads, which that does not divide: set"),
        ("cpu.tp=2 hw.cores=1", "cpu.tp=2 and only 1 cores may be used here, one a rank: lower"),
        ("cpu.tp=2 model.source=smollm2", "cpu.tp=2 and the model has 3 KV heads, which that does"),
        ("cpu.all_reduce=mpi", "cpu.all_reduce=mpi is unknown: choose one of auto, shared_memory,"),
        ("cpu.threads=2", "cpu.threads=2 is above 1, the number of that worker's cores: lower it"),
        ("kv.host_gib=100", "kv.host_gib=100 is more than the"),
        ("kv.gpu_blocks=100000000", "kv.gpu_blocks=100000000 is more than the"),
        ("kv.gpu_gib=0.0000001", "holds no KV block"),
        ("model.max_context=9999", "9999 is more than the 2048 tokens that model.source="),
        ("model.source=random:llama-3.1-8b", "needs 29.9 GiB a worker in float32 and 16.0 GiB"),
        (
            "model.source=random:llama-3.1-8b hw.host_gib=8",
            "and 8.0 GiB of memory may be used: choose a smaller model, or raise hw.host_gib.",
        ),
        ("runtime.round_log=/nowhere/log", "runtime.round_log=/nowhere/log cannot be written"),
        ("compile.cache_dir=/dev/null/x", "compile.cache_dir=/dev/null/x cannot be written"),
        ("compile.cache_dir=''", "compile.cache_dir is empty"),
        ("gpu.max_batch_size=9000", "gpu.max_batch_size=9000 is more than the 8192 tokens of gpu."),
        ("compile.cache_dir=/proc/x", "compile.cache_dir=/proc/x cannot be written"),
        ("model.source=org/name", "nothing is downloaded: fetch the model first"),
    ],
)
def test_what_this_machine_cannot_do_gets_one_sentence(overrides: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides.split())
    text = str(caught.value)
    assert sentence in text
    assert text.endswith(".") and "\n" not in text


def test_an_hw_file_bounds_what_is_used_of_a_larger_machine() -> None:
    made = plan("hw.cores=4", "hw.vram_gib=24", "hw.host_gib=8", on=BIG)
    assert max(made.gpu.cores + made.cpu.cores + made.runtime.cores) == 3
    assert made.kv.gpu_pool_blocks * made.kv.bytes_per_block < 24 * GIB
    assert made.kv.host_pool_blocks * made.kv.bytes_per_block < 8 * GIB


def test_an_hw_file_without_gpus_leaves_those_alone_that_are_there() -> None:
    assert plan("hw.gpus=0", on=BIG).gpu.device == "cpu"


def test_an_hw_file_of_one_gpu_may_serve_on_several() -> None:
    several = replace(BIG, gpus=BIG.gpus * 4)
    assert plan("hw.gpus=1", "gpu.tp=2", on=several).gpu.rank_cores == ((12,), (13,))
    with pytest.raises(ConfigError, match=r"gpu\.tp=2 and this machine shows 1 GPU: set gpu"):
        plan("hw.gpus=1", "gpu.tp=2", on=BIG)
