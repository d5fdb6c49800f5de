"""`python -m dualpace.runtime.profile.child`: measures points in a process of its own.

Reads an order from its input, settles as the CPU worker does (cores and threads before any import
of torch), and writes a file a point as soon as it is measured. A point that fails leaves its reason
in a file of its own and does not stop the others. Never started by a person.
"""

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from dualpace.errors import ConfigError
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import become_child
from dualpace.runtime.profile.config import SweepConfig
from dualpace.runtime.profile.points import Point
from dualpace.runtime.worker.main import settle


@dataclass(slots=True)
class Order:
    """What a child is told. The stamp of a point goes into its file as it is."""

    parent: int
    folder: str
    plan: str  # JSON
    sweep: SweepConfig
    points: list[Point]
    stamps: list[dict[str, Any]]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        fields["sweep"] = SweepConfig(**fields["sweep"])
        fields["points"] = [Point(**point) for point in fields["points"]]
        return cls(**fields)


def point_file(folder: Path, point: Point) -> Path:
    return folder / f"{point.name}.json"


def main() -> None:
    order = Order.from_json(sys.stdin.read())
    become_child(order.parent, ignore_signals=False)
    plan = Plan.from_json(order.plan)
    settle(plan, "cpu")
    sys.exit(run(order, plan))


def run(order: Order, plan: Plan) -> int:
    """0 if every point was measured."""
    from dualpace.runtime.profile.measure import measure
    from dualpace.runtime.profile.station import Station

    station = Station(plan, order.sweep.temperature, order.to_json())
    failed = 0
    try:
        for point, stamp in zip(order.points, order.stamps, strict=True):
            started = time.monotonic()
            try:
                values = measure(point, station, order.sweep)
            except Exception as error:  # the parent tells; the other points are worth having
                failed += 1
                if not isinstance(error, ConfigError):
                    traceback.print_exc()
                print(f"{point.name}: {type(error).__name__}: {error}", file=sys.stderr)
                if plan.cpu.tp > 1:
                    break  # ranks no longer agree on what comes next
                continue
            seconds = round(time.monotonic() - started, 3)
            write(order, point, {**stamp, "seconds": seconds, "values": values})
    finally:
        station.close()
    return min(failed, 1)


def write(order: Order, point: Point, result: dict[str, Any]) -> None:
    """Whole or not at all."""
    file = point_file(Path(order.folder), point)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"point": asdict(point), **result}, indent=1))
    part.rename(file)


if __name__ == "__main__":
    main()
