"""The server that a benchmark drives: one that runs already, or one that lives as long as the run.

Client and server share a machine, so a server started here leaves the client a core where there
are enough. Knows nothing about load.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from dualpace.errors import ConfigError
from dualpace.runtime.bench.peers import Run, peer_command
from dualpace.runtime.process import ending

if TYPE_CHECKING:
    from dualpace.settings.schema import BenchConfig

log = logging.getLogger(__name__)

_POLL_S = 0.1
_END_S = 30.0  # that a server may take to end
_FEW_CORES = 4  # with fewer, nothing is kept for the client


@contextlib.contextmanager
def running_server(config: "BenchConfig", longest: int) -> Iterator[str]:
    """The address of a server that is ready for requests of up to `longest` tokens with their
    answers. Raises ConfigError, with the server's last words, for one that does not start."""
    if config.bench.url is not None:
        yield config.bench.url
        return
    for_server, for_client = split_cores(config.bench.client_cores, config.hw.cores)
    port = config.server.port or free_port()
    before = os.sched_getaffinity(0)
    with started(config, port, for_server, longest) as url:
        os.sched_setaffinity(0, for_client)
        try:
            yield url
        finally:
            os.sched_setaffinity(0, before)


def split_cores(
    client_cores: int | None, claimed: int | None = None
) -> tuple[list[int], list[int]]:
    """(server's, client's) of the cores that this process may use; shared where there are few, or
    where the server's `claimed` ones are all: with fewer it would find no profile."""
    cores = sorted(os.sched_getaffinity(0))
    spare = len(cores) - (claimed or 0)
    kept = client_cores if client_cores is not None else int(len(cores) >= _FEW_CORES and spare > 0)
    if not 0 <= kept < len(cores):
        raise ConfigError(
            f"bench.client_cores={kept} leaves the server none of {len(cores)} cores: lower it."
        )
    return (cores[:-kept], cores[-kept:]) if kept else (cores, cores)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def started(config: "BenchConfig", port: int, cores: Sequence[int], longest: int) -> Iterator[str]:
    """Runs the server in a session of its own, so that Ctrl-C reaches it through this process."""
    who, words = "this project's server", ["serve"]
    if config.bench.peer:
        run = Run(len(cores), longest)
        who, words = config.bench.peer, ["exec", *peer_command(config, port, run)]
    place = [str(os.getpid()), ",".join(map(str, cores))]
    command = [sys.executable, "-m", "dualpace.runtime.bench.child", *place, *words]
    with contextlib.ExitStack() as stack:
        log_path = config.bench.server_log
        if log_path is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dualpace-bench-"))
            log_path = f"{folder}/server.log"
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        output = stack.enter_context(Path(log_path).open("wb"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(end, process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(server_settings(config, port).encode() if not config.bench.peer else b"")
        url = f"http://127.0.0.1:{port}"
        log.info("starting %s at %s", who, url)
        wait_ready(process, url, config, Path(log_path))
        yield url


def server_settings(config: "BenchConfig", port: int) -> str:
    """The part of the settings that `scripts/serve.py` would take, as YAML."""
    from dualpace.settings.schema import ServeConfig

    values = {f.name: getattr(config, f.name) for f in fields(ServeConfig)}
    node = OmegaConf.structured(ServeConfig(**values))
    node.server.host, node.server.port = "127.0.0.1", port
    return OmegaConf.to_yaml(node)


def wait_ready(
    process: subprocess.Popen[bytes], url: str, config: "BenchConfig", log_path: Path
) -> None:
    path = "/health" if config.bench.peer else "/ready"
    deadline_s = time.monotonic() + config.bench.start_timeout_s
    shown = ""
    while True:
        status, body = get(url + path)
        if status == 200:
            return
        phase = phase_of(body)
        if phase != shown:
            shown = phase
            log.info("server: %s", phase)
        if process.poll() is not None or time.monotonic() > deadline_s:
            late = f"was not ready within {config.bench.start_timeout_s:g} s"
            what = late if process.poll() is None else ending(process.returncode)
            words = " ".join(log_path.read_text(errors="replace").split("\n")[-8:]).strip()
            remedy = " (raise bench.start_timeout_s)" * (what == late)
            said = f"Its last words: {words[-1500:]}" if words else "It said nothing."
            raise ConfigError(f"The server {what}{remedy}. {said}")
        time.sleep(_POLL_S)


def get(url: str) -> tuple[int | None, bytes]:
    """(status, body); None if nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return None, b""


def phase_of(body: bytes) -> str:
    """What our own server's /ready says that it does."""
    try:
        return str(json.loads(body).get("phase", ""))
    except (ValueError, AttributeError):
        return ""


def end(process: subprocess.Popen[bytes]) -> None:
    """The whole family, politely first."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
