"""How other servers are started so that they can be compared: the same pool, limits and context.

A peer is what its project ships, found on PATH; `bench.peer_command` replaces its program and
`bench.peer_args` adds to its options. Knows no HTTP.
"""

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from dualpace.errors import ConfigError

if TYPE_CHECKING:
    from dualpace.settings.schema import BenchConfig


def peer_command(config: "BenchConfig", port: int) -> list[str]:
    """The command that serves `config.model` on 127.0.0.1:`port` with the peer's program.

    Raises ConfigError for an unknown peer, one that is not installed, or what it cannot do.
    """
    load = config.bench
    assert load.peer is not None
    if load.peer not in PEERS:
        raise ConfigError(f"bench.peer={load.peer} is unknown: choose one of {', '.join(PEERS)}.")
    program, options = PEERS[load.peer]
    command = load.peer_command or [*program]
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"bench.peer={load.peer} needs {command[0]}, which is not on PATH: install it, name "
            f"it by bench.peer_command, or start it yourself and give bench.url."
        )
    return [*command, *options(config), "--host", "127.0.0.1", "--port", str(port), *load.peer_args]


def vllm(config: "BenchConfig") -> list[str]:
    """Without prefix caching: prompts are random, so it could only cost."""
    return [*vllm_common(config), "--no-enable-prefix-caching"]


def vllm_offload(config: "BenchConfig") -> list[str]:
    """Native KV offloading: a second tier of the prefix cache, which must be on."""
    if config.kv.host_gib is None:
        raise ConfigError("bench.peer=vllm_offload needs kv.host_gib, the size of its host tier.")
    size = f"{config.kv.host_gib:g}"
    return [
        *vllm_common(config),
        *("--kv-offloading-backend", "native", "--kv-offloading-size", size),
    ]


def vllm_common(config: "BenchConfig") -> list[str]:
    dtype = {"bf16": "bfloat16"}.get(config.model.dtype, config.model.dtype)
    options: dict[str, str | int | None] = {
        "--dtype": dtype,
        "--seed": config.model.seed,
        "--max-num-batched-tokens": config.gpu.token_limit,
        "--max-num-seqs": config.gpu.max_batch_size,
        "--tensor-parallel-size": config.gpu.tp,
        "--max-model-len": config.model.max_context,
        # One more: vLLM keeps a block for itself.
        "--num-gpu-blocks-override": None if config.kv.gpu_blocks is None else blocks(config) + 1,
    }
    return [config.model.source, *given(options)]


def llama_cpp(config: "BenchConfig") -> list[str]:
    """`-c` is the KV of all slots together; one slot a request under way."""
    return [
        *("-m", config.model.source, "-ngl", "999"),
        *given(
            {
                "-np": config.gpu.max_batch_size,
                "-c": None if config.kv.gpu_blocks is None else blocks(config) * 16,
                "-b": config.gpu.token_limit,
                "-t": config.cpu.threads,
            }
        ),
    ]


def blocks(config: "BenchConfig") -> int:
    assert config.kv.gpu_blocks is not None
    return config.kv.gpu_blocks


def given(options: dict[str, str | int | None]) -> list[str]:
    """Those that are set, as arguments."""
    pairs = ((name, str(value)) for name, value in options.items() if value is not None)
    return [word for pair in pairs for word in pair]


# Program, and its options for a configuration.
PEERS: dict[str, tuple[tuple[str, ...], Callable[["BenchConfig"], list[str]]]] = {
    "vllm": (("vllm", "serve"), vllm),
    "vllm_offload": (("vllm", "serve"), vllm_offload),
    "llama_cpp": (("llama-server",), llama_cpp),
}
