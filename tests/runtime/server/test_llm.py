"""The offline API on the fake engine; its settings and its exit as a plain script."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_tokenizer import EOS, ByteTokenizer
from plans import small_plan

from dualpace import LLM, SamplingParams
from dualpace.errors import ConfigError
from dualpace.llm import _end
from dualpace.runtime.engine_client import EngineGone, RequestRefused
from dualpace.settings.compose import load
from dualpace.settings.overrides import as_overrides, override
from tests.servers import PATIENCE_S

HERE = Path(__file__).parent
LONG = SamplingParams(max_tokens=300)


def open_llm(source: str = "fake") -> LLM:
    return LLM.from_plan(small_plan(source), "fake_engine", lambda source: ByteTokenizer())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        with open_llm() as llm:
            yield llm
    assert llm._client.process.returncode == 0


def test_outputs_come_in_order(llm):
    prompts = [f"prompt {number}" for number in range(40)]
    outputs = llm.generate(prompts, LONG)
    assert [output.text for output in outputs] == prompts
    assert all(output.finish_reason == "stop" for output in outputs)
    assert outputs[3].prompt_token_ids == list(b"prompt 3")
    assert outputs[3].token_ids == [*b"prompt 3", EOS]
    assert outputs[3].tokens_by_engine == {"gpu": 5, "cpu": 4}


def test_one_prompt_as_text_or_ids(llm):
    assert [output.text for output in llm.generate("text", LONG)] == ["text"]
    assert [output.text for output in llm.generate([104, 105], LONG)] == ["hi"]
    assert [output.text for output in llm.generate([[104], [105]], LONG)] == ["h", "i"]
    assert llm.generate([], LONG) == []


def test_parameters_for_each_prompt(llm):
    params = [SamplingParams(max_tokens=2), SamplingParams(stop="c", max_tokens=9)]
    outputs = llm.generate(["abcd", "abcd"], params)
    assert [(o.text, o.finish_reason, len(o.token_ids)) for o in outputs] == [
        ("ab", "length", 2),
        ("ab", "stop", 3),
    ]
    seen = json.loads(llm.generate("params", SamplingParams(seed=5, max_tokens=200))[0].text)
    assert seen["seeds"] == 5 and seen["max_tokens"] == 200
    unlimited = json.loads(llm.generate("params", SamplingParams(max_tokens=None))[0].text)
    assert unlimited["max_tokens"] == 4096 - len("params")
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], [LONG])


def test_chat(llm):
    hello = [{"role": "user", "content": "hello"}]
    assert [o.text for o in llm.chat(hello, LONG)] == ["hello"]
    assert [o.text for o in llm.chat([hello, hello], LONG)] == ["hello", "hello"]


@pytest.mark.parametrize("prompts", [[""], ["x" * 4096], [[257]]])
def test_prompts_that_can_never_run(llm, prompts):
    with pytest.raises(ValueError, match=r"prompt|Token ids"):
        llm.generate(prompts, LONG)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, [{"max_tokens": 1}], 5])
def test_parameters_of_another_type_are_refused(llm, params):
    said = str(params).strip("[]")
    with pytest.raises(ValueError, match=rf"^params are SamplingParams, not {said}\.$"):
        llm.generate(["a"], params)


def test_the_prompt_of_several_that_can_never_run_is_named(llm):
    with pytest.raises(ValueError, match=r"^'prompts\[1\]' is empty: send some text"):
        llm.generate(["a", ""])


def test_a_setting_of_servers_is_refused():
    with pytest.raises(ConfigError, match=r"^server\.port has no effect on LLM"):
        LLM("random:tiny", **{"server.port": 1})


def test_a_fork_is_told_so_and_leaves_the_engine_to_its_parent(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm, "_owner", 1)
        with pytest.raises(RuntimeError, match="belongs to process 1, of which this one is a fork"):
            llm.generate("x", LONG)
    _end(llm._client, llm._loop, owner=1)  # as at the fork's exit
    assert llm.generate("still", LONG)[0].text == "still"


def test_a_refusal_gives_up_the_rest(llm):
    with pytest.raises(RequestRefused, match="more memory"):
        llm.generate(["hang", "refuse"], LONG)
    assert llm.stats()["gpu_running"] == 0


def test_one_that_is_given_up_costs_no_other_its_answer(llm):
    outputs = llm.generate(["one", "poison", "two"], LONG)
    assert [o.text for o in outputs] == ["one", "poi", "two"]
    assert [o.finish_reason for o in outputs] == ["stop", "error", "stop"]


def test_several_threads_share_it(llm):
    texts = []
    threads = [
        threading.Thread(target=lambda i=i: texts.append(llm.generate(f"t{i}", LONG)[0].text))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == ["t0", "t1", "t2", "t3"]


def test_the_bar_is_for_terminals(llm, capfd):
    llm.generate(["quiet"], LONG)
    assert capfd.readouterr() == ("", "")
    llm.generate(["loud"], LONG, progress=True)
    assert "1/1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"temperature": -1}, "temperature=-1 is out of range"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1e300}, "use 0 to 100"),
        ({"top_p": 0}, "top_p=0 is out of range"),
        ({"top_k": -2}, "top_k=-2"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"seed": 2**63}, "64 bits"),
        ({"stop": [""]}, "empty string"),
        ({"min_tokens": 17}, "min_tokens=17 is out of range: use 0 or more, at most max_tokens=16"),
        ({"min_tokens": -1, "max_tokens": None}, "use 0 or more"),
        ({"min_p": float("nan")}, "min_p=nan"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
        ({"repetition_penalty": 1e-38}, "use 0.01 to 100, 1 for none"),
        ({"logit_bias": {3: float("nan")}}, "nan for token 3"),
    ],
)
def test_sampling_parameters_out_of_range(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        SamplingParams(**wrong)


@pytest.mark.parametrize("wrong", [{"logit_bias": {257: 1.0}}, {"stop_token_ids": [257]}])
def test_tokens_that_the_model_does_not_have(llm, wrong):
    with pytest.raises(ValueError, match="names token 257: this model has 0 to 256"):
        llm.generate("hi", SamplingParams(**wrong))


def test_a_stop_token_ends_the_text(llm):
    (output,) = llm.generate("abcd", SamplingParams(stop_token_ids=[ord("c")]))
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("ab", "stop", 3)
    assert output.stop_reason == ord("c")


def test_a_closed_llm_says_so(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    llm = open_llm()
    llm.close()
    llm.close()
    for ask in (lambda: llm.generate("hi"), llm.stats):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            ask()


def test_starts_that_fail(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with pytest.raises(ConfigError, match="lower it"):
        open_llm("fake:user-error")
    with pytest.raises(RuntimeError, match="status 5"):
        open_llm("fake:crash")


def test_an_engine_that_dies(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with open_llm() as llm, pytest.raises(EngineGone, match="status 3"):
        llm.generate(["hang", "die"], LONG)


SCRIPT = """
from byte_tokenizer import ByteTokenizer
from plans import small_plan
from dualpace import LLM, SamplingParams

llm = LLM.from_plan(small_plan(), "fake_engine", lambda source: ByteTokenizer())
print(llm.generate("no guard, no close", SamplingParams(max_tokens=100))[0].text)
print(llm._client.process.pid)
"""


def test_a_plain_script_ends_by_itself(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    text, pid = done.stdout.split("\n")[:2]
    assert (done.returncode, done.stderr, text) == (0, "", "no guard, no close")
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("model.source", "/models/with space/it's=1", "/models/with space/it's=1"),
        ("model.source", "random:tiny", "random:tiny"),
        ("model.name", "1e3", "1e3"),
        ("model.max_context", 512, 512),
        ("model.max_context", None, None),
        ("runtime.look_ahead", False, False),
        ("compile.buckets", [1, 8], [1, 8]),
        ("kv.gpu_gib", 0.5, 0.5),
    ],
)
def test_overrides_say_what_they_mean(key, value, read):
    group, name = key.split(".")
    assert getattr(getattr(load(override(key, value)), group), name) == read


def test_groups_are_overrides_too():
    assert load(override("policy", "gpu_only")).policy.name == "gpu_only"
    assert load(override("+hw", "cpu")).hw.name == "cpu"


def test_a_dict_is_a_group():
    found = as_overrides({"policy": "gpu_only", "kv": {"gpu_blocks": 8, "host_gib": None}})
    assert found == ["policy=gpu_only", "kv.gpu_blocks=8", "kv.host_gib=null"]


def test_an_override_that_does_not_exist_is_a_sentence():
    with pytest.raises(ConfigError, match="gpu_blokcs"):
        LLM("random:tiny", **{"kv.gpu_blokcs": 1})


def test_importing_dualpace_is_light():
    code = "import sys, dualpace; dualpace.SamplingParams; print(len(sys.modules))"
    code += "; print([m for m in ('torch', 'numpy', 'fastapi', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"
