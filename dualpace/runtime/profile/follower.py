"""`python -m dualpace.runtime.profile.follower`: another CPU rank than the first of those that
measure. It makes the calls that the first one makes and keeps no results. Never started by a
person.
"""

import argparse
import os
import socket
import sys
from typing import TYPE_CHECKING

from dualpace.runtime.messages import Hello
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import become_child, receive
from dualpace.runtime.profile.child import Order
from dualpace.runtime.worker.link import LifelineClosedError
from dualpace.runtime.worker.main import settle

if TYPE_CHECKING:
    from dualpace.runtime.profile.batches import BatchMaker
    from dualpace.runtime.profile.host import HostWorker


class FollowerStation:
    """What a point uses on this rank."""

    def __init__(self, plan: Plan, cpu: "HostWorker", batches: "BatchMaker") -> None:
        self.plan, self.cpu, self.batches = plan, cpu, batches


def arrive() -> tuple[int, str, socket.socket, str]:
    """(rank, descriptors as JSON, lifeline, what it is told first) of a process that a
    `RankProcess` started."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--fds", required=True)
    options = parser.parse_args()
    become_child(options.parent, ignore_signals=False)
    lifeline = socket.socket(fileno=options.lifeline)
    hello = receive(lifeline)
    assert isinstance(hello, Hello)
    return options.rank, options.fds, lifeline, hello.plan


def main() -> None:
    rank, fds, lifeline, text = arrive()
    order = Order.from_json(text)
    plan = Plan.from_json(order.plan)
    settle(plan, "cpu", rank)
    try:
        follow(order, plan, rank, fds, lifeline)
    except LifelineClosedError:
        sys.stdout.flush()
        os._exit(0)


def follow(order: Order, plan: Plan, rank: int, fds: str, lifeline: socket.socket) -> None:
    """All points that take the CPU's ranks, in order; then waits until it is no longer needed."""
    from dualpace.runtime.profile.host import HostWorker, RankLink
    from dualpace.runtime.profile.measure import ON_HOST, measure
    from dualpace.runtime.profile.station import batch_maker

    link = RankLink.attach(plan, "cpu", rank, fds, lifeline)
    batches = batch_maker(plan, order.sweep.temperature)
    station = FollowerStation(plan, HostWorker(plan, link), batches)
    for point in order.points:
        if point.kind in ON_HOST:
            measure(point, station, order.sweep)
    lifeline.recv(1)


if __name__ == "__main__":
    main()
