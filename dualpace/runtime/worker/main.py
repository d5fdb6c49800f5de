"""A worker process from its first line to its last.

Affinity and thread counts are set from the plan before torch or Numba is imported, so nothing here
or imported here may import them at the top.
"""

import argparse
import faulthandler
import gc
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from dualpace.errors import ConfigError
from dualpace.runtime.messages import Failed, Hello, Phase, Ready
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import PEER_LOST, become_child, receive
from dualpace.runtime.worker.copies import CopyEngine
from dualpace.runtime.worker.link import LifelineClosedError, Link
from dualpace.runtime.worker.progress import Progress

_THREAD_COUNTS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_SHOWN = 1000  # characters of an exception in a sentence


def main(
    arguments: Sequence[str] | None = None,
    copy_engine: Callable[[int], CopyEngine] = CopyEngine,
) -> None:
    """Runs until the lifeline closes. `copy_engine(doorbell)` makes the accelerator's copies (tests
    bring their own).

    Exits with status 1 after `Failed` has been sent, whether it could not start or met an exception
    in a batch: what the batch has left is unknown, and on a device an error may stay for good. So
    the engine starts another. PEER_LOST: another rank is gone.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--role", choices=("gpu", "cpu"), required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--fds", required=True)
    options = parser.parse_args(arguments)
    become_child(options.parent, ignore_signals=True)
    faulthandler.enable()  # a kernel's fault says where, too
    lifeline = socket.socket(fileno=options.lifeline)
    try:
        hello = receive(lifeline)
    except EOFError:
        return  # the engine changed its mind
    assert isinstance(hello, Hello)
    plan = Plan.from_json(hello.plan)
    link = Link.attach(plan, options.role, options.rank, options.fds, lifeline)
    try:
        settle(plan, options.role, options.rank)
        _serve(plan, options.role, link, copy_engine)
    except LifelineClosedError:
        _end(0)
    except ConfigError as error:
        link.send(Failed(str(error), 1))
    except Exception as error:  # the engine hears of it, whoever reads the log sees where
        traceback.print_exc()
        what = f"{type(error).__name__}: {error}"[:_SHOWN]
        link.send(Failed(f"the {options.role} worker failed: {what}", 0))
    _end(1)


def _end(status: int) -> NoReturn:
    """At once: nothing here is worth the second that torch takes to end, or a device's error on the
    way."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def settle(plan: Plan, role: str, rank: int = 0) -> None:
    """Cores and thread counts of this process. Before any import of torch or Numba."""
    part = plan.gpu if role == "gpu" else plan.cpu
    if part.rank_cores:
        os.sched_setaffinity(0, part.rank_cores[rank])
    os.environ.update(dict.fromkeys(_THREAD_COUNTS, str(part.threads)))
    os.environ["NUMBA_THREADING_LAYER"] = "omp"  # torch's own pool; a second one would fight it
    os.environ["NUMBA_CACHE_DIR"] = str(Path(plan.compile.cache_dir) / "numba")


def _serve(plan: Plan, role: str, link: Link, copy_engine: Callable[[int], CopyEngine]) -> None:
    link.send(Phase("importing torch"))
    started = time.monotonic()
    gc.disable()  # a fifth of the imports' time would go into looking for garbage there is none of
    from dualpace.graphs.collective import PeerLost
    from dualpace.runtime.worker import build

    gc.freeze()
    gc.enable()

    def say(text: str) -> None:
        link.check_lifeline()
        link.send(Phase(text))

    progress = Progress(say)
    progress.seconds["import"] = round(time.monotonic() - started, 3)
    worker: build.Worker
    try:
        if role == "gpu":
            worker = build.build_accelerator(plan, link, progress, copy_engine)
        else:
            worker = build.build_cpu(plan, link, progress)
        link.await_host_pool(progress)
        worker.ready()
        gc.collect()
        gc.freeze()  # else a collection between two stages looks at all that was imported: 0.1 s
        info = {"seconds": progress.seconds, "bytes": progress.bytes}
        link.send(Ready(json.dumps({**info, "layer_times": progress.layer_times})))
        while True:
            worker.turn()
    except PeerLost as error:  # nothing that this one did: the engine starts all ranks again
        print(f"{role} worker {link.rank}: {error}", file=sys.stderr)
        _end(PEER_LOST)
