"""How many KV blocks each tier gets: as told, or from the memory that the weights leave."""

from dualpace.errors import ConfigError
from dualpace.graphs.spec import ModelSpec
from dualpace.runtime.kv.layout import KvLayout
from dualpace.runtime.plan import ITEMSIZE
from dualpace.runtime.schedule.policies import policy_class
from dualpace.settings.hardware import GIB, Hardware
from dualpace.settings.schema import SystemConfig

# The stand-in's pool is small, so that the host tier gets work at two dozen streams.
STAND_IN_GPU_BLOCKS = 256
STAND_IN_HOST_BYTES = 2 * GIB
STAND_IN_HOST_BLOCKS = 8192
GPU_USE = 0.9  # of the memory of a GPU; the rest is the driver's and the allocator's
GPU_WORKSPACE_BYTES = GIB  # activations, staging, captured graphs
HOST_USE = 0.8  # of the memory that is free now


def bytes_per_block(spec: ModelSpec, dtype: str) -> int:
    """Of all layers."""
    layout = KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, ITEMSIZE[dtype])
    return layout.block_bytes


def pool_blocks(
    config: SystemConfig, hardware: Hardware, device: str, spec: ModelSpec, dtype: str
) -> tuple[int, int]:
    """Usable blocks of the accelerator's pool and of the host pool (0 without a host tier)."""
    block_bytes = bytes_per_block(spec, dtype)
    weights = spec.num_parameters() * ITEMSIZE[dtype]
    kv = config.kv
    on_gpu = device == "cuda"
    # A GPU's weights pass through host memory, and the CPU worker may keep its own packed besides.
    host_memory = int(hardware.memory_bytes * HOST_USE) - weights * (3 if on_gpu else 2)
    if host_memory < 0:
        raise ConfigError(
            f"model.source={config.model.source} needs {weights / GIB:.1f} GiB a worker in {dtype} "
            f"and {hardware.memory_bytes / GIB:.1f} GiB of memory may be used: choose a smaller "
            f"model{', or raise hw.host_gib' * (config.hw.host_gib is not None)}."
        )
    gpu_memory = host_memory
    gpu_auto = STAND_IN_GPU_BLOCKS * block_bytes
    if on_gpu:
        one = min(gpu.memory_bytes for gpu in hardware.gpus[: config.gpu.tp])
        gpu_memory = config.gpu.tp * (int(one * GPU_USE) - GPU_WORKSPACE_BYTES) - weights
        gpu_auto = gpu_memory
    gpu = _blocks("gpu", kv.gpu_blocks, kv.gpu_gib, gpu_auto, gpu_memory, block_bytes)
    if gpu < 1:
        raise ConfigError(
            f"kv.gpu_gib={kv.gpu_gib} holds no KV block of {block_bytes} bytes: raise it."
            if kv.gpu_gib is not None
            else f"model.source={config.model.source} leaves no memory for KV on the GPU: choose a "
            f"smaller model."
        )
    if not policy_class(config.policy.name).uses_host:
        return gpu, 0
    if not on_gpu:
        host_memory -= gpu * block_bytes
    stand_in_host = min(STAND_IN_HOST_BYTES, STAND_IN_HOST_BLOCKS * block_bytes, host_memory // 2)
    host_auto = host_memory if on_gpu else stand_in_host
    host = _blocks("host", kv.host_blocks, kv.host_gib, host_auto, host_memory, block_bytes)
    return gpu, host


def _blocks(
    tier: str, blocks: int | None, gib: float | None, auto: int, memory: int, block_bytes: int
) -> int:
    """Blocks as told in blocks or GiB, else `auto` bytes' worth; at most `memory` bytes' worth."""
    fit = max(memory // block_bytes, 0)
    if blocks is None and gib is None:
        return min(auto // block_bytes, fit)
    wanted = blocks if blocks is not None else int((gib or 0) * GIB) // block_bytes
    if wanted > fit:
        key, value, limit = (
            ("blocks", str(blocks), f"{fit} blocks")
            if blocks is not None
            else ("gib", str(gib), f"{memory / GIB:.1f} GiB")
        )
        raise ConfigError(
            f"kv.{tier}_{key}={value} is more than the {limit} that fit beside the model: lower it "
            f"or leave it out."
        )
    return wanted
