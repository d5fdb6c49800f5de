"""Which executables a start makes: backends to time, rows to build for, where they are kept."""

from dualpace.cpu import isa
from dualpace.errors import ConfigError
from dualpace.graphs.buckets import stage_buckets
from dualpace.graphs.config import BF16_BACKENDS, FLOAT32_BACKENDS, CompileConfig
from dualpace.runtime.plan import BucketPlan, CompilePlan
from dualpace.settings.paths import default_cache, folder
from dualpace.settings.schema import SystemConfig


def compile_plan(
    config: SystemConfig, device: str, dtype: str, hard_limit: int, cpu_rows: int, num_cores: int
) -> CompilePlan:
    """Buckets of the accelerator hold the CPU's batches too: it may have to assist with them."""
    given = config.compile
    gpu_rows = max(config.gpu.max_batch_size, cpu_rows)
    return CompilePlan(
        candidates_gpu=_candidates("backend_gpu", given, device, dtype),
        candidates_cpu=_candidates("backend_cpu", given, "cpu", dtype),
        buckets_gpu=_buckets(max(hard_limit, cpu_rows), gpu_rows, num_cores, given.buckets),
        buckets_cpu=_buckets(cpu_rows, cpu_rows, num_cores, given.buckets),
        cache_dir=folder("compile.cache_dir", given.cache_dir) or default_cache(),
        start=given.start,
    )


def _candidates(key: str, config: CompileConfig, device: str, dtype: str) -> tuple[str, ...]:
    """The one backend that was asked for, or what is worth timing."""
    specific: str | None = getattr(config, key)
    name = specific or config.backend
    only = _DTYPES.get(name, dtype)
    if only != dtype:
        raise ConfigError(
            f"compile.{key if specific else 'backend'}={name} multiplies {only} only and the model "
            f"is served in {dtype}: set model.dtype={only}, or another backend."
        )
    if name != "auto":
        return (name,)
    if device != "cpu":
        return ("eager",)
    if dtype == "float32":  # packing does not pay for a few rows and for hundreds
        return ("eager", "packed", "inductor-rows", "inductor-packed")
    # In bf16 plain matrices were never the fastest.
    return ("eager", "packed", "inductor-packed", *_ON_TILES.get(isa.detected().level, ()))


_DTYPES = dict.fromkeys(BF16_BACKENDS, "bf16") | dict.fromkeys(FLOAT32_BACKENDS, "float32")
_ON_TILES = {
    isa.Level.AMX: ("amx", "inductor-amx"),
    isa.Level.AVX512_BF16: ("avx512-bf16", "inductor-avx512-bf16"),
}


def _buckets(max_tokens: int, max_rows: int, num_cores: int, given: list[int] | None) -> BucketPlan:
    sizes = stage_buckets(max_tokens, max_rows, num_cores, given)
    return BucketPlan(layers=sizes["post_attention"], final=sizes["logits"])
