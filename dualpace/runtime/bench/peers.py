"""How other servers are started so that they can be compared: the same model under the same name,
the same pool, limits and context.

A peer is what its project ships, found on PATH; `bench.peer_command` replaces its program and
`bench.peer_args` adds to its options. Knows no HTTP.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dualpace.block import BLOCK_TOKENS
from dualpace.errors import ConfigError
from dualpace.graphs.source import resolve_source

if TYPE_CHECKING:
    from dualpace.settings.schema import BenchConfig


@dataclass(frozen=True, slots=True)
class Run:
    """What a peer is started for: its cores, and the tokens of the longest request and answer."""

    cores: int
    longest: int


def peer_command(config: "BenchConfig", port: int, run: Run) -> list[str]:
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
    return [
        *command,
        *options(config, run),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *load.peer_args,
    ]


def model(config: "BenchConfig") -> tuple[str, str]:
    """(what the peer loads, its name in requests and figures): both as our own server has them."""
    source, name = config.model.source, config.model.name
    if source.startswith("random:"):
        raise ConfigError(
            f"bench.peer={config.bench.peer} cannot make the weights of model.source={source}: "
            f"name files that it loads."
        )
    if source == "smollm2":
        packaged = resolve_source(source)
        return str(packaged.path), name or packaged.name
    path = Path(source)
    return source, name or (path.stem if path.suffix == ".gguf" else path.name)


def vllm(config: "BenchConfig", run: Run) -> list[str]:
    """Without prefix caching: prompts are random, so it could only cost."""
    return [*vllm_common(config), "--no-enable-prefix-caching"]


def vllm_offload(config: "BenchConfig", run: Run) -> list[str]:
    """Native KV offloading: a second tier of the prefix cache, which must be on."""
    if config.kv.host_gib is None:
        raise ConfigError("bench.peer=vllm_offload needs kv.host_gib, the size of its host tier.")
    size = f"{config.kv.host_gib:g}"
    return [
        *vllm_common(config),
        *("--kv-offloading-backend", "native", "--kv-offloading-size", size),
    ]


def vllm_common(config: "BenchConfig") -> list[str]:
    source, name = model(config)
    options: dict[str, str | int | None] = {
        "--served-model-name": name,
        "--dtype": {"bf16": "bfloat16"}.get(config.model.dtype, config.model.dtype),
        "--seed": config.model.seed,
        "--max-num-batched-tokens": config.gpu.token_limit,
        "--max-num-seqs": config.gpu.max_batch_size,
        "--tensor-parallel-size": config.gpu.tp,
        "--max-model-len": config.model.max_context,
        # One more: vLLM keeps a block for itself.
        "--num-gpu-blocks-override": config.kv.gpu_blocks and config.kv.gpu_blocks + 1,
    }
    return [source, *given(options)]


def llama_cpp(config: "BenchConfig", run: Run) -> list[str]:
    """A slot serves one request at a time and holds `-c` / `-np` tokens, so there are as many as
    the pool has room for at the longest request's length. Prompts are random, so caching them could
    only cost."""
    if config.kv.gpu_blocks is None:
        raise ConfigError(
            "bench.peer=llama_cpp needs kv.gpu_blocks, the KV of all its slots in blocks of "
            f"{BLOCK_TOKENS} tokens: as many as your own pools have."
        )
    tokens = config.kv.gpu_blocks * BLOCK_TOKENS
    source, name = model(config)
    options: dict[str, str | int | None] = {
        "-m": source,
        "--alias": name,
        "-ngl": 999,
        "-np": min(max(tokens // run.longest, 1), config.gpu.max_batch_size),
        "-c": tokens,
        "-b": config.gpu.token_limit,
        # Its own choice are physical cores, as if no virtual ones were given.
        "-t": config.cpu.threads or run.cores,
        "--cache-ram": 0,
    }
    return [*given(options), "--no-cache-prompt"]


def given(options: dict[str, str | int | None]) -> list[str]:
    """Those that are set, as arguments."""
    pairs = ((name, str(value)) for name, value in options.items() if value is not None)
    return [word for pair in pairs for word in pair]


# Program, and its options for a configuration.
PEERS: dict[str, tuple[tuple[str, ...], Callable[["BenchConfig", Run], list[str]]]] = {
    "vllm": (("vllm", "serve"), vllm),
    "vllm_offload": (("vllm", "serve"), vllm_offload),
    "llama_cpp": (("llama-server",), llama_cpp),
}
