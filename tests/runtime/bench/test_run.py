"""From settings to result files against a fake server: keys, records, peers, sweeps, refusals."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.bench.counters import engine_facts
from dualpace.runtime.bench.peers import Run, peer_command
from dualpace.runtime.bench.run import bench
from dualpace.runtime.bench.start import server_settings, split_cores
from dualpace.settings.compose import load
from dualpace.settings.schema import BenchConfig
from tests.runtime.bench.fake_openai import Behaviour, FakeOpenAI, serving
from tests.servers import PATIENCE_S

ROOT = Path(__file__).parents[3]
FAKE = Path(__file__).with_name("fake_openai.py")
SMALL = [
    "workload=fixed",
    "workload.num_requests=8",
    "workload.prompt_len=20",
    "workload.output_len=5",
    "workload.rate=50",
    "bench.warmup=2",
]
VLLM_KEYS = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
} | {
    f"{spread}_{name}_ms"
    for spread in ("mean", "median", "std", "p99")
    for name in ("ttft", "tpot", "itl", "e2el")
}


def settings(*overrides: str) -> BenchConfig:
    config = load(*SMALL, *overrides, root="bench")
    assert isinstance(config, BenchConfig)
    return config


@pytest.fixture
def fake() -> Iterator[Callable[[Behaviour], str]]:
    """Starts a fake server on a thread of its own and gives its address."""
    ends: list[Callable[[], None]] = []

    def start(behaviour: Behaviour) -> str:
        urls: list[str] = []
        ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

        async def serve() -> None:
            async with serving(FakeOpenAI(behaviour)) as url:
                urls.append(url)
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        ends.append(lambda: (loop.call_soon_threadsafe(stop.set), thread.join())[1])
        assert ready.wait(PATIENCE_S)
        return urls[0]

    yield start
    for end in ends:
        end()


def test_a_result_has_the_keys_of_vllm_and_says_what_it_measured(
    fake: Callable[[Behaviour], str], tmp_path: Path
) -> None:
    url = fake(Behaviour(engines=True))
    records, file = tmp_path / "records.jsonl", tmp_path / "sub" / "result.json"
    config = settings(
        f"bench.url={url}",
        "bench.label=mine",
        f"bench.records={records}",
        f"result={file}",
        "bench.goodput={ttft: 1000000, itl: 1000000}",
    )
    (result,) = bench(config, "python scripts/bench.py")
    assert result.keys() >= VLLM_KEYS
    assert (result["completed"], result["failed"], result["wrong_lengths"]) == (8, 0, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (160, 40)
    assert (result["cpu_resident_tokens"], result["gpu_resident_tokens"]) == (8, 32)
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert result["mean_normalized_latency_s_per_token"] > 0
    assert (result["policy"], result["model_id"], result["rate"]) == ("mine", "fake", 50)
    assert result["command"] == "python scripts/bench.py" and result["machine"]["cpu"]
    assert result["timeline"]["tokens"][-1] == 40
    assert json.loads(file.read_text()) == result
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [line["id"] for line in lines] == list(range(8))
    assert all(line["sent_s"] >= line["arrival_s"] for line in lines)
    assert all(len(line["token_times_s"]) == line["output_len"] == 5 for line in lines)


def test_several_rates_share_a_server_and_each_has_a_file(
    fake: Callable[[Behaviour], str], tmp_path: Path
) -> None:
    url = fake(Behaviour())
    config = settings(
        f"bench.url={url}", f"bench.out={tmp_path}", "bench.rates=[40,80]", "workload.label=a b"
    )
    results = bench(config)
    assert [r["rate"] for r in results] == [40, 80]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"dualpace-a_b-40.json", "dualpace-a_b-80.json"}


def test_a_cut_sweep_goes_on_where_it_was(fake: Callable[[Behaviour], str], tmp_path: Path) -> None:
    seconds = ["bench.seconds=0.1", "bench.resume=true", f"bench.out={tmp_path}"]
    rates = "bench.rates=[50,100]"
    first = bench(settings(f"bench.url={fake(Behaviour())}", "bench.rates=[50]", *seconds))
    assert first[0]["num_requests"] == 5 == len(first[0]["input_lens"])
    both = bench(settings(f"bench.url={fake(Behaviour())}", rates, *seconds))
    assert both[0] == first[0] and both[1]["num_requests"] == 10
    nowhere = f"bench.url=http://127.0.0.1:{1}"
    assert bench(settings(nowhere, rates, *seconds)) == both  # all is known: nobody is asked
    other = [*seconds[1:], "bench.seconds=0.2"]
    again = bench(settings(f"bench.url={fake(Behaviour())}", "bench.rates=[50]", *other))
    assert again[0]["num_requests"] == 10  # other requests are measured
    with pytest.raises(ConfigError, match=r"bench\.seconds=1 at rate inf"):
        bench(settings(nowhere, "workload.rate=inf", "bench.seconds=1"))


def test_goodput_counts_requests_within_all_targets(fake: Callable[[Behaviour], str]) -> None:
    url = fake(Behaviour())
    (result,) = bench(settings(f"bench.url={url}", "bench.goodput={ttft: 0.0001, itl: 1000000}"))
    assert result["request_goodput"] == 0 and result["completed"] == 8


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("bench.url=http://127.0.0.1:9", r"does not list its models \(Connection refused\)"),
        ("bench.peer=sglang", "choose one of vllm, vllm_offload, llama_cpp"),
        ("bench.peer=vllm", "needs vllm, which is not on PATH"),
        ("bench.client_cores=1000", "leaves the server none"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        bench(settings(override))


def test_a_load_of_which_nothing_is_answered_is_no_result(
    fake: Callable[[Behaviour], str], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    url = fake(Behaviour(status=500))
    with pytest.raises(ConfigError, match="answered none of 8 requests: 500: "):
        bench(settings(f"bench.url={url}", "bench.warmup=0", f"result={file}"))
    assert not file.exists()


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="closed loop"):
        settings("bench.concurrency=4", "bench.ramp_from=1")
    with pytest.raises(ConfigError, match="one file"):
        settings("bench.rates=[1,2]", "result=x.json")
    with pytest.raises(ConfigError, match=r"bench\.concurrency=0 is not above 0"):
        settings("bench.concurrency=0")
    with pytest.raises(ConfigError, match=r"bench\.url=host:80 is no address.*http://HOST:PORT"):
        settings("bench.url=host:80")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("bench.percentiles=[50,101]", "bench.percentiles has 101: use numbers from 0 to 100."),
        ("bench.percentiles=[nan]", "bench.percentiles has nan: use numbers from 0 to 100."),
        (
            "bench.figures=[9,99]",
            "bench.figures has 99: choose of 1, 8, 9, 10, 11, 12, 13, 14, 15.",
        ),
        ("bench.goodput.ttft=-1", "bench.goodput.ttft=-1 is not above 0 ms: raise it."),
        ("bench.warmup=-1", "bench.warmup=-1 is no number from 0 on: set one, or leave it out."),
        ("bench.client_cores=-1", "bench.client_cores=-1 is no number from 0 on: set one, or"),
        ("bench.start_timeout_s=nan", "bench.start_timeout_s=nan is not above 0: raise it or"),
        ("bench.figures=[9]", "bench.figures has no effect without bench.out: set it, too."),
        ("bench.page=x.md", "bench.page has no effect without bench.out: set it, too."),
        ("bench.resume=true", "bench.resume has no effect without bench.out: set it, too."),
        ("bench.peer_args=[a]", "bench.peer_args has no effect without bench.peer: set it, too."),
        ("bench.page=a/b.md", "bench.page=a/b.md is no name of a file: leave folders out, it"),
    ],
)
def test_what_a_load_cannot_use_is_said_before_it(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        settings(override)


@pytest.mark.parametrize("key", ["result", "bench.records", "bench.server_log", "bench.out"])
def test_where_nothing_can_be_written_is_said_before_the_load(key: str) -> None:
    """Not after it, with what was measured lost."""
    with pytest.raises(ConfigError, match=rf"{key}=/proc/no/file cannot be written: name a "):
        settings(f"{key}=/proc/no/file")


def test_a_peer_is_started_measured_and_ended(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    config = settings(
        "bench.peer=vllm",
        f"bench.peer_command=[{sys.executable},{FAKE}]",
        f"bench.server_log={log}",
        "bench.client_cores=0",
        "bench.concurrency=4",
    )
    before = os.sched_getaffinity(0)
    (result,) = bench(config)
    assert (result["policy"], result["completed"], result["max_concurrency"]) == ("vllm", 8, 4)
    assert os.sched_getaffinity(0) == before
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    assert not any("fake_openai" in command for command in commands)


def test_a_server_that_does_not_start_leaves_its_last_words() -> None:
    broken = "bench.peer_command=[sh,-c,'echo the reason; exit 3']"
    with pytest.raises(ConfigError, match=r"status 3\. Its last words: the reason"):
        bench(settings("bench.peer=llama_cpp", "kv.gpu_blocks=100", broken))


def test_a_server_that_is_late_and_silent_is_told_with_the_setting() -> None:
    late = ("bench.peer_command=[sh,-c,'exec sleep 600']", "bench.start_timeout_s=0.01")
    said = (
        r"^The server was not ready within 0\.01 s \(raise bench\.start_timeout_s\)\. It said noth"
    )
    with pytest.raises(ConfigError, match=said):
        bench(settings("bench.peer=llama_cpp", "kv.gpu_blocks=100", *late))


def line(*overrides: str, longest: int = 300) -> str:
    """The command of a peer on two cores."""
    config = settings("bench.peer_command=[sh]", *overrides)
    return " ".join(peer_command(config, 7, Run(cores=2, longest=longest)))


def test_peers_get_the_same_limits() -> None:
    common = ["kv.gpu_blocks=100", "gpu.token_limit=512", "gpu.max_batch_size=64"]
    common += ["model.source=/models/x"]
    plain = line("bench.peer=vllm", *common)
    assert plain.startswith("sh /models/x ") and plain.endswith("--host 127.0.0.1 --port 7")
    for part in (
        "--served-model-name x",
        "--num-gpu-blocks-override 101",
        "--max-num-batched-tokens 512",
        "--max-num-seqs 64",
        "--no-enable-prefix-caching",
    ):
        assert part in plain
    offload = line("bench.peer=vllm_offload", "kv.host_gib=2.5", "model.source=/models/x")
    assert "--kv-offloading-backend native --kv-offloading-size 2.5" in offload
    assert "--num-gpu-blocks-override" not in offload
    with pytest.raises(ConfigError, match=r"needs kv\.host_gib"):
        line("bench.peer=vllm_offload")


def test_slots_of_llama_cpp_hold_the_longest_request_each() -> None:
    llama = ["bench.peer=llama_cpp", "kv.gpu_blocks=100", "gpu.max_batch_size=64"]
    args = line(*llama, "bench.peer_args=[-fa,on]", "model.source=/models/x.gguf")
    assert "-m /models/x.gguf --alias x " in args and "-np 5 -c 1600 -t 2 " in args
    assert "--cache-ram 0 --no-cache-prompt" in args and args.endswith("-fa on")
    assert "-np 64 " in line(*llama, longest=10)
    assert "-np 1 " in line(*llama, longest=9999)
    assert "-t 3 " in line(*llama, "cpu.threads=3")
    with pytest.raises(ConfigError, match=r"needs kv\.gpu_blocks"):
        line("bench.peer=llama_cpp")


def test_peers_load_our_model_under_our_name() -> None:
    """Figures put servers into one panel by the model's name."""
    packaged = line("bench.peer=llama_cpp", "kv.gpu_blocks=9")
    assert re.search(r"-m \S+\.gguf --alias SmolLM2-135M-Instruct ", packaged)
    assert "--alias mine " in line("bench.peer=llama_cpp", "kv.gpu_blocks=9", "model.name=mine")
    with pytest.raises(ConfigError, match=r"cannot make the weights of model\.source=random:tiny"):
        line("bench.peer=vllm", "model=tiny_random")


def test_our_server_gets_the_settings_of_the_run() -> None:
    from io import StringIO

    from dualpace.runtime.bench.child import settings as read

    config = settings("policy=neo", "policy.launch_ms=0.5", "kv.gpu_blocks=77")
    got = read(StringIO(server_settings(config, 4321)))
    assert (got.policy, got.kv, got.model) == (config.policy, config.kv, config.model)
    assert (got.server.host, got.server.port) == ("127.0.0.1", 4321)


def test_cores_are_kept_for_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1, 2, 0})
    assert split_cores(None) == ([0, 1, 2], [3])
    assert split_cores(2) == ([0, 1], [2, 3])
    assert split_cores(0) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert split_cores(None, claimed=3) == ([0, 1, 2], [3])
    # A server that is to have all of them has them.
    assert split_cores(None, claimed=4) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert split_cores(1, claimed=4) == ([0, 1, 2], [3])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert split_cores(None) == ([0, 1], [0, 1])


def test_counters_are_those_of_the_run() -> None:
    before = 'dualpace_rounds_total{engine="gpu"} 5.0\nvllm:num_preemptions_total{a="b"} 1\n'
    after = (
        '# HELP x\ndualpace_rounds_total{engine="gpu"} 25.0\n'
        'dualpace_rounds_total{engine="cpu"} 7.0\nvllm:num_preemptions_total{a="b"} 4\n'
        'dualpace_busy_seconds_total{engine="gpu"} 3.0\n'
        'dualpace_kv_blocks_capacity{pool="host"} 64.0\n'
    )
    facts = engine_facts(before, after, 6.0)
    assert (facts["gpu_rounds"], facts["cpu_rounds"], facts["preemptions"]) == (20, 7, 3)
    assert facts["gpu_busy"] == 0.5 and facts["host_blocks"] == 64
    spent = 'dualpace_assist_seconds_total{{part="launch"}} {}\n'
    facts = engine_facts(before + spent.format(1.0), after + spent.format(1.5), 6.0)
    assert facts["assist_seconds"] == {"launch": 0.5}
    assert engine_facts(None, after, 6.0) == {}


def test_a_sweep_measures_each_policy_that_is_named_and_draws(
    fake: Callable[[Behaviour], str], tmp_path: Path
) -> None:
    url = fake(Behaviour())
    done = subprocess.run(
        [
            *(
                sys.executable,
                str(ROOT / "scripts" / "bench.py"),
                "-m",
                "+experiment=fig9_conv_small",
            ),
            *(f"bench.url={url}", "bench.rates=[100,200]", "policy=neo,gpu_only"),
            "workload.num_requests=10",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    lines: list[Any] = done.stdout.strip().splitlines()
    results = [json.loads(line) for line in lines if line.startswith('{"kind"')]
    assert {(r["policy"], r["rate"]) for r in results} == {
        (policy, rate) for policy in ("neo", "gpu_only") for rate in (100, 200)
    }
    out = tmp_path / "runs" / "live" / "conversation_small"
    assert json.loads(lines[-1])["p99_itl_ms"] > 0
    assert "figures: runs/live/conversation_small/figure1.png" in done.stderr
    assert (out / "figure9.png").stat().st_size > 5000
    assert (out / "figure8.svg").is_file() and not (out / "figure12.png").exists()  # no assists
    assert "conversation on " in (out / "README.md").read_text()
    assert len(list(out.glob("*-conversation-*.json"))) == 4
