"""Many clients at once, clients that leave, and what /metrics says about both."""

import asyncio
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.server.asking import post, refusal
from tests.servers import PATIENCE_S

LONG = "slow " + 2000 * "!"  # takes so long that it ends by leaving alone


def wait_for_metric(server, sample, value):
    deadline = time.monotonic() + PATIENCE_S
    while server.metric(sample) != value:
        assert time.monotonic() < deadline, f"{sample} is {server.metric(sample)}"
        time.sleep(0.02)


def metrics(server):
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_64_streams_at_once(server):
    async def one(client, number):
        text, usage = "", None
        stream = await client.completions.create(
            model="tiny",
            prompt=f"this is number {number}",
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
            usage = chunk.usage
        assert text == f"this is number {number}"
        assert usage.completion_tokens == len(text) + 1

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            await asyncio.gather(*(one(client, number) for number in range(64)))

    asyncio.run(all_of_them())
    assert server.metric('dualpace_kv_blocks_used{pool="gpu"}') == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [LONG, "hang for ever", [LONG, "hang for ever"]])
def test_a_client_that_leaves_frees_its_blocks(server, stream, prompt):
    used = 'dualpace_kv_blocks_used{pool="gpu"}'
    cancelled = 'dualpace_events_total{event="cancelled"}'
    before = server.metric(cancelled)
    num_prompts = 1 if isinstance(prompt, str) else len(prompt)
    body = {"model": "tiny", "prompt": prompt, "stream": stream, "max_tokens": 2000}

    async def leave():
        async with httpx.AsyncClient(base_url=server.url) as http:
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            while server.metric(used) < num_prompts:
                await asyncio.sleep(0.02)
            asking.cancel()

    asyncio.run(leave())
    wait_for_metric(server, used, 0)
    assert server.metric(cancelled) == before + num_prompts


def test_leaving_in_the_middle_of_a_stream(server, client):
    stream = client.completions.create(model="tiny", prompt=LONG, stream=True, max_tokens=2000)
    assert next(iter(stream)).choices[0].text.startswith("s")
    stream.close()
    wait_for_metric(server, 'dualpace_kv_blocks_used{pool="gpu"}', 0)
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
    assert server.metric(aborted) >= 1


def test_metrics_move(server, client):
    before = metrics(server)
    client.completions.create(model="tiny", prompt="slow", max_tokens=3)
    after = metrics(server)

    def grown(name, **labels):
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before[key]

    ours = {"model_name": "tiny", "engine": "0"}
    assert grown("vllm:prompt_tokens_total", **ours) == 4
    assert grown("vllm:generation_tokens_total", **ours) == 3
    assert grown("vllm:request_success_total", **ours, finished_reason="length") == 1
    assert grown("vllm:request_success_total", **ours, finished_reason="stop") == 0
    for histogram, count in (
        ("time_to_first_token_seconds", 1),
        ("request_time_per_output_token_seconds", 1),
        ("e2e_request_latency_seconds", 1),
        ("request_queue_time_seconds", 1),
        ("request_prefill_time_seconds", 1),
        ("request_decode_time_seconds", 1),
        ("request_inference_time_seconds", 1),
        ("request_prompt_tokens", 1),
        ("request_generation_tokens", 1),
        ("request_params_max_tokens", 1),
        ("request_params_n", 1),
        ("request_max_num_generation_tokens", 1),
        ("inter_token_latency_seconds", 2),
        ("iteration_tokens_total", 3),
    ):
        assert grown(f"vllm:{histogram}_count", **ours) == count, histogram
    assert grown("vllm:iteration_tokens_total_sum", **ours) == 4 + 3
    assert grown("dualpace_tokens_total", engine="gpu") == 2
    assert grown("dualpace_tokens_total", engine="cpu") == 1


def test_a_client_that_leaves_is_no_fault_of_the_server(server):
    def answers(status):
        labels = (("handler", "/v1/completions"), ("method", "POST"), ("status", status))
        return metrics(server).get(("http_requests_total", labels), 0)

    before = {status: answers(status) for status in ("4xx", "5xx")}

    async def leave():
        async with httpx.AsyncClient(base_url=server.url) as http:
            body = {"model": "tiny", "prompt": "hang for ever", "max_tokens": 2000}
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            while not server.metric('dualpace_kv_blocks_used{pool="gpu"}'):
                await asyncio.sleep(0.02)
            asking.cancel()

    asyncio.run(leave())
    deadline = time.monotonic() + PATIENCE_S
    while answers("4xx") == before["4xx"]:
        assert time.monotonic() < deadline and answers("5xx") == before["5xx"]
        time.sleep(0.02)


def test_answers_are_counted_by_route_and_class_of_status(server):
    def count(handler, method, status):
        labels = (("handler", handler), ("method", method), ("status", status))
        return metrics(server).get(("http_requests_total", labels), 0)

    asked = [
        ("GET", "/v1/models", "/v1/models", "2xx"),
        ("GET", "/v1/models/other", "/v1/models/{model:path}", "4xx"),
        ("POST", "/v1/completions", "/v1/completions", "4xx"),  # no body
        ("GET", "/nowhere", "none", "4xx"),
    ]
    before = [count(handler, method, status) for method, _, handler, status in asked]
    for method, path, _, _ in asked:
        server.http.request(method, path)
    after = [count(handler, method, status) for method, _, handler, status in asked]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1, 1]
    for word in ("BREW", "ANY-WORD"):  # which clients choose: no label each
        server.http.request(word, "/nowhere")
    assert count("none", "BREW", "4xx") == 0 and count("none", "other", "4xx") >= 2
    assert count("/metrics", "GET", "2xx") == 0


def test_metrics_of_the_engine(server):
    now = metrics(server)
    ours = (("engine", "0"), ("model_name", "tiny"))
    for name, labels, value in (
        ("vllm:num_requests_running", ours, 0),
        ("vllm:num_requests_waiting", ours, 0),
        ("vllm:num_requests_waiting_by_reason", (*ours, ("reason", "capacity")), 0),
        ("vllm:kv_cache_usage_perc", ours, 0),
        ("vllm:num_preemptions_total", ours, 2),
        ("dualpace_requests_running", (("engine", "cpu"),), 0),
        ("dualpace_requests_waiting", (("engine", "gpu"),), 0),
        ("dualpace_kv_blocks_capacity", (("pool", "gpu"),), 100),
        ("dualpace_kv_blocks_capacity", (("pool", "host"),), 200),
        ("dualpace_kv_blocks_used", (("pool", "host"),), 0),
        ("dualpace_transfers_total", (), 3),
        ("dualpace_kv_blocks_checked_total", (), 5),
        ("dualpace_graph_compiles_after_ready_total", (), 0),
        ("dualpace_worker_restarts_total", (("worker", "gpu"),), 0),
        ("dualpace_worker_rounds_lost_total", (("worker", "gpu"),), 2),
        ("dualpace_worker_rounds_lost_total", (("worker", "cpu"),), 0),
        ("dualpace_requests_given_up_total", (), 1),
        ("dualpace_worker_ready", (("worker", "gpu"),), 1),
        ("dualpace_worker_ranks", (("worker", "gpu"),), 1),
        ("dualpace_engine_answers", (), 1),
        ("dualpace_seconds_since_progress", (), 0),
    ):
        assert now[name, labels] == value, name


def test_a_stuck_engine_shows(server, client):
    """Alive, ready and progressing are three answers."""
    stream = client.completions.create(model="tiny", prompt="stall", stream=True)
    chunks, text = iter(stream), ""
    while text != "sta":
        text += next(chunks).choices[0].text
    time.sleep(0.2)
    assert server.metric("dualpace_seconds_since_progress") >= 0.2
    assert server.http.get("/ready").status_code == 200
    stream.close()
    wait_for_metric(server, "dualpace_seconds_since_progress", 0)


def test_a_request_that_is_given_up_ends_alone_with_an_error_of_its_own(server):
    asked = {"model": "tiny", "prompt": "poison", "max_tokens": 20}
    told = refusal(post(server, "completions", asked), 500)
    assert told["code"] == "engine_error" and told["type"] == "server_error"
    assert told["message"].startswith("The request was given up: the gpu worker is lost")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream, text = client.completions.create(**asked, stream=True), ""
        with pytest.raises(openai.APIError, match="given up") as error:
            for chunk in stream:
                text += chunk.choices[0].text
        assert text == "poi" and error.value.code == "engine_error"
        again = client.completions.create(**{**asked, "prompt": "fine"})
        assert again.choices[0].text == "fine"
    ended = (("engine", "0"), ("finished_reason", "error"), ("model_name", "tiny"))
    assert metrics(server)["vllm:request_success_total", ended] >= 2
