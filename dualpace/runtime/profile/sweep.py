"""A sweep from its settings to its files: what is missing is measured, a child process a point,
then everything is fitted, written and drawn. Computes nothing itself and imports no torch.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dualpace.graphs.source import resolve_source
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import ending
from dualpace.runtime.profile.child import Order, point_file
from dualpace.runtime.profile.points import Point, all_points, chosen
from dualpace.runtime.profile.progress import SweepBar, is_newer, last_line
from dualpace.runtime.profile.setting import measuring_plan
from dualpace.settings.hardware import Hardware, probe
from dualpace.settings.machine import Fingerprint, fingerprint, provenance
from dualpace.settings.paths import file_name, folder
from dualpace.settings.schema import ProfileHwConfig

log = logging.getLogger(__name__)

POLL_S = 0.2
CHILD = "dualpace.runtime.profile.child"
_PLACES = ("results", "out", "figures")  # folders
# What a finished point may differ in from this run's settings and still count.
ELSEWHERE = frozenset(
    (
        *_PLACES,
        "name",
        "point",
        "gpu_weight",
        "epsilon",
        "plateau_points",
        "tolerance",
        "share_child",
        "timeout_s",
        "check",
        "check_requests",
        "check_prompt",
        "check_output",
    )
)


class Sweep:
    """One run over a folder of points."""

    def __init__(self, config: ProfileHwConfig, hardware: Hardware | None = None) -> None:
        asked = config.profile  # what is written at the end is refused at the start
        places: dict[str, Any] = {
            key: folder(f"profile.{key}", getattr(asked, key)) for key in _PLACES
        }
        file_name("profile.name", asked.name, "profile.out and profile.results name them")
        self.config, self.settings = config, replace(asked, **places)
        self.hardware = hardware or probe()
        self.spec = resolve_source(config.model.source).spec
        self.points = chosen(self.settings)
        self.everything = all_points(self.settings)
        self.plan = measuring_plan(config, self.settings, self.everything, self.hardware)
        self.fingerprint = fingerprint_of(self.plan, self)
        self.name = self.settings.name or default_name(config)
        self.folder = Path(self.settings.results) / self.name
        self.folder.mkdir(parents=True, exist_ok=True)

    def measure(self) -> dict[str, str]:
        """Measures what is not finished; returns the reason of each point that failed."""
        missing = [point for point in self.points if self.result(point) is None]
        if finished := len(self.points) - len(missing):
            log.info("%d of %d points are finished already", finished, len(self.points))
        if not missing:
            return {}
        log.info(
            "measuring %d points, results and logs in %s; the first one compiles what is missing "
            "and takes the longest",
            len(missing),
            self.folder,
        )
        groups = [missing] if self.settings.share_child else [[point] for point in missing]
        failed: dict[str, str] = {}
        with SweepBar(len(missing)) as bar:
            for group in groups:
                failed |= self._run_child(group, bar)
        for reason in dict.fromkeys(failed.values()):
            log.error("%s", reason)
        return failed

    def result(self, point: Point) -> dict[str, Any] | None:
        """What was measured at `point` on this machine with these settings, if it was."""
        file = point_file(self.folder, point)
        if not file.is_file():
            return None
        found: dict[str, Any] = json.loads(file.read_text())
        same = found["fingerprint"] == self.fingerprint and found["settings"] == self._key(point)
        return found if same else None

    def _key(self, point: Point) -> dict[str, Any]:
        """Settings that the numbers of this point depend on."""
        others = ("route", "beside", "decode", "prefill", "step")
        kept = {k: v for k, v in asdict(self.settings).items() if k not in ELSEWHERE}
        mine = {
            key: value
            for key, value in kept.items()
            if not key.endswith("_batches")
            and not any(key.startswith(f"{kind}_") for kind in others if kind != point.kind)
        }
        plan = self.plan.compile
        backends = {"cpu": list(plan.candidates_cpu), "gpu": list(plan.candidates_gpu)}
        return {**mine, "backends": backends, "assist_mode": self.plan.assist.mode}

    def _run_child(self, points: Sequence[Point], bar: SweepBar) -> dict[str, str]:
        """Reasons of the points that one child process did not measure."""
        log_file = self.folder / f"{points[0].name if len(points) == 1 else 'points'}.log"
        plan = measuring_plan(self.config, self.settings, points, self.hardware)
        stamps = [self._key(point) for point in points]
        order = Order(
            parent=os.getpid(),
            folder=str(self.folder),
            plan=plan.to_json(),
            sweep=self.settings,
            points=list(points),
            stamps=[{**self._stamp(plan), "settings": stamp} for stamp in stamps],
        )
        started, look = time.time(), bar.watch(points, self.folder, log_file)
        status = run_child(order, log_file, self.settings.timeout_s, look)
        done = [p for p in points if is_newer(point_file(self.folder, p), started)]
        reason = status or last_line(log_file)
        lines = log_file.read_text(errors="replace").splitlines()
        return {
            point.name: next((li for li in lines if li.startswith(f"{point.name}: ")), reason)
            for point in points
            if point not in done
        }

    def _stamp(self, plan: Plan) -> dict[str, Any]:
        """What every point of one child carries."""
        return {
            "fingerprint": self.fingerprint,
            "provenance": provenance(plan),
            "layers": plan.model.num_layers,
        }


def run_child(order: Order, log_file: Path, timeout_s: float, look: Callable[[], None]) -> str:
    """Runs the order to its end, however it ends; why it was stopped, or nothing."""
    with log_file.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", CHILD],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        assert process.stdin is not None
        process.stdin.write(order.to_json())
        process.stdin.close()
        deadline = time.monotonic() + timeout_s
        while process.poll() is None:
            time.sleep(POLL_S)
            look()
            if time.monotonic() > deadline:
                return f"stopped after profile.timeout_s={timeout_s:g} s"
        look()
        return "" if process.returncode >= 0 else ending(process.returncode)
    finally:
        process.kill()  # its GPU worker dies with it
        process.wait()


def fingerprint_of(plan: Plan, sweep: Sweep) -> Fingerprint:
    return fingerprint(
        device=plan.gpu.device,
        dtype=plan.model.dtype,
        threads=(plan.gpu.threads, plan.cpu.threads),
        tp=(plan.gpu.tp, plan.cpu.tp),
        spec=sweep.spec,
        hardware=sweep.hardware,
    )


def default_name(config: ProfileHwConfig) -> str:
    """`h200_llama_31_8b`: the hw file's name, or `here`, and the model's; ranks where there are
    several, as `_gpu2_cpu1`."""
    machine = "here" if config.hw.name == "auto" else config.hw.name
    model = resolve_source(config.model.source).name.removeprefix("random-")
    gpu, cpu = config.gpu.tp, config.cpu.tp
    ranks = "" if gpu == cpu == 1 else f"_gpu{gpu}_cpu{cpu}"
    return f"{machine}_{model}{ranks}".lower().replace("-", "_").replace(".", "")
