"""Real worker processes: start, serve, end with their engine, and say why they cannot start."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from dualpace.runtime import messages as m
from dualpace.runtime.channel import Channel, eventfd
from dualpace.runtime.process import send, start_process
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wiring import assist_layout, channel_size, kv_layout
from tests.servers import PATIENCE_S


class Process:
    """A worker process and an engine's ends of its channel. Its host pool is not there yet."""

    def __init__(self, plan, role):
        self.host = SharedRegion.promise(
            "host", kv_layout(plan).host_bytes(plan.kv.host_pool_blocks)
        )
        self.regions = [SharedRegion.create("assist", assist_layout(plan).nbytes), self.host]
        self.channel = Channel.create("channel", channel_size(plan, role))
        self.other = eventfd()
        fds = {
            "channel": self.channel.region.fd,
            "bell_down": self.channel.bell_down,
            "bell_up": self.channel.bell_up,
            "other_bell_0": self.other,
            "assist": self.regions[0].fd,
            "host_pool": self.host.fd,
        }
        arguments = ["--role", role, "--fds", json.dumps(fds)]
        self.popen, self.lifeline = start_process(
            plan.runtime.worker_module, arguments, list(fds.values()), {}
        )
        send(self.lifeline, m.Hello(plan.to_json()))
        self.seen = []

    def expect(self, kind, text=""):
        """The first message of that kind, or the first Phase of that text."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.seen.extend(self.channel.up.take())
            for message in self.seen:
                if isinstance(message, kind) and (not text or message.text == text):
                    return message
            time.sleep(0.005)
        raise AssertionError(f"no {kind.__name__} {text}: {self.seen}")

    def close(self):
        self.lifeline.close()
        self.popen.kill()
        self.popen.wait()
        self.channel.close()
        os.close(self.other)
        for region in self.regions:
            region.close()


@pytest.fixture
def start(make_plan):
    started = []

    def make(role, *overrides, change=lambda plan: plan):
        started.append(Process(change(make_plan(*overrides)), role))
        return started[-1]

    yield make
    for process in started:
        process.close()


def test_workers_start_ignore_signals_sleep_and_end_with_their_lifeline(start):
    core = min(os.sched_getaffinity(0))
    workers = [start(role, change=lambda plan: _on_core(plan, core)) for role in ("gpu", "cpu")]
    for worker in workers:
        worker.expect(m.Phase, "waiting for the host pool's memory")
        assert not any(isinstance(message, m.Ready) for message in worker.seen)
        worker.host.reserve("host")
        ready = json.loads(worker.expect(m.Ready).info)
        assert ready["bytes"]["weights"] > 0
        assert {"weights", "stages", "attention"} <= set(ready["seconds"])
        phases = [message.text for message in worker.seen if isinstance(message, m.Phase)]
        assert phases[:2] == ["importing torch", "loading random-config"]
        assert os.sched_getaffinity(worker.popen.pid) == {core}
    for worker in workers:
        worker.popen.send_signal(signal.SIGINT)
        worker.popen.send_signal(signal.SIGTERM)
    for worker in workers:
        _wait_at_rest(worker.popen.pid)
        assert worker.popen.poll() is None
        worker.lifeline.shutdown(socket.SHUT_RDWR)
    assert [worker.popen.wait(PATIENCE_S) for worker in workers] == [0, 0]


def test_a_user_gets_a_sentence_and_a_defect_leaves_a_trace(start, tmp_path, capfd):
    source = f"random:{tmp_path / 'no.json'}"
    lost = start("gpu", change=lambda p: replace(p, model=replace(p.model, source=source)))
    failed = lost.expect(m.Failed)
    assert failed.user_error == 1
    assert "no.json" in failed.text
    assert lost.popen.wait(PATIENCE_S) == 1
    assert "Traceback" not in capfd.readouterr().err

    fault = start("cpu")
    fault.expect(m.Phase)
    fault.popen.send_signal(signal.SIGSEGV)
    assert fault.popen.wait(PATIENCE_S) == -signal.SIGSEGV
    assert "Segmentation fault" in capfd.readouterr().err

    broken = start("cpu", change=lambda p: replace(p, model=replace(p.model, num_kv_heads=3)))
    failed = broken.expect(m.Failed)
    assert failed.user_error == 0
    assert broken.popen.wait(PATIENCE_S) == 1
    assert "Traceback" in capfd.readouterr().err


def _on_core(plan, core):
    return replace(
        plan,
        gpu=replace(plan.gpu, rank_cores=((core,),), threads=1),
        cpu=replace(plan.cpu, rank_cores=((core,),), threads=1),
    )


def test_a_worker_dies_with_a_killed_engine(make_plan):
    plan = make_plan()
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, plan.to_json()], stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    worker, keeper = map(int, engine.stdout.readline().split())
    ended = select.poll()
    ended.register(pidfd := os.pidfd_open(worker), select.POLLIN)
    engine.kill()
    engine.wait()
    assert ended.poll(PATIENCE_S * 1000)
    os.close(pidfd)
    os.kill(keeper, signal.SIGKILL)
    engine.stdout.close()


# Starts a worker, which speaks once it is settled, and a process that keeps its lifeline open: only
# its parent's death can end it.
ENGINE = """
import json, os, sys, time
from dualpace.runtime.channel import Channel, eventfd
from dualpace.runtime.messages import Hello, Phase
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import send, start_process
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wiring import assist_layout, channel_size, kv_layout
from tests.servers import PATIENCE_S

plan = Plan.from_json(sys.argv[1])
channel = Channel.create("channel", channel_size(plan, "cpu"))
assist = SharedRegion.create("assist", assist_layout(plan).nbytes)
host = SharedRegion.create("host", kv_layout(plan).host_bytes(plan.kv.host_pool_blocks))
fds = dict(channel=channel.region.fd, bell_down=channel.bell_down, bell_up=channel.bell_up,
           other_bell_0=eventfd(), assist=assist.fd, host_pool=host.fd)
process, lifeline = start_process(
    plan.runtime.worker_module, ["--role", "cpu", "--fds", json.dumps(fds)], list(fds.values()), {})
send(lifeline, Hello(plan.to_json()))
while not any(isinstance(message, Phase) for message in channel.up.take()):
    time.sleep(0.01)
keeper = os.fork()
if keeper:
    print(process.pid, keeper, flush=True)
time.sleep(600)
"""


def _wait_at_rest(pid):
    """Counted in processor time, so a busy machine does not matter."""
    deadline, used = time.monotonic() + PATIENCE_S, 1.0
    while used > 0.02:
        assert time.monotonic() < deadline, f"it uses {used:.2f} s of half a second"
        before = _cpu_seconds(pid)
        time.sleep(0.5)
        used = _cpu_seconds(pid) - before


def _cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
