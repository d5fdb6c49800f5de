"""What the first rank decides reaches the others in order, once, and never overtakes them."""

import os
import select
import threading

from dualpace.runtime.channel import eventfd
from dualpace.runtime.order import TASK, Decision, Order, OrderFollower, OrderLeader


def make(size: int) -> tuple[OrderLeader, list[OrderFollower], list[int]]:
    memory = memoryview(bytearray(Order.nbytes(size)))
    bells = [eventfd() for _ in range(1, size)]
    leader = OrderLeader(Order(memory, size), bells, lambda: True)
    followers = [OrderFollower(Order(memory, size), rank) for rank in range(1, size)]
    return leader, followers, bells


def test_every_follower_reads_every_decision_and_is_woken() -> None:
    leader, followers, bells = make(3)
    said = [Decision(TASK), Decision(1, 7, 30, all_greedy=False)]
    said += [Decision(2, 0, 5, needs_logits=True), Decision(TASK)]
    assert followers[0].next() is None
    for decision in said:
        leader.say(decision)
    for follower, bell in zip(followers, bells, strict=True):
        assert select.select([bell], [], [], 0)[0]
        assert [follower.next() for _ in range(5)] == [*said, None]
        os.close(bell)


def test_the_leader_waits_for_those_that_are_far_behind() -> None:
    leader, followers, bells = make(3)
    count = 3000  # more than the ring holds
    seen: list[list[int]] = [[], []]
    readers = [
        threading.Thread(target=_read, args=(follower, count, layers))
        for follower, layers in zip(followers, seen, strict=True)
    ]
    talk = threading.Thread(target=lambda: [leader.say(Decision(0, i)) for i in range(count)])
    for thread in (talk, *readers):
        thread.start()
    for thread in (talk, *readers):
        thread.join()
    assert seen == [list(range(count))] * 2
    for bell in bells:
        os.close(bell)


def _read(follower: OrderFollower, count: int, seen: list[int]) -> None:
    while len(seen) < count:
        decision = follower.next()
        if decision is not None:
            seen.append(decision.layer)
