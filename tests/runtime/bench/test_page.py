"""The results page: every point, ratios of sustained rates, provenance once."""

import json
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from dualpace.runtime.bench.metrics import RequestRecord, summarize
from dualpace.runtime.bench.page import page
from dualpace.runtime.bench.report import DrawFigures


def result(policy: str, rate: float, latency_s: float) -> dict[str, Any]:
    records = [RequestRecord(0, 0.0, 10, [latency_s, 2 * latency_s], cpu_tokens=1)]
    return summarize(records) | {
        "kind": "measured",
        "profile": "box",
        "policy": policy,
        "variant": None,
        "workload": "conversation",
        "rate": rate,
        "num_requests": 1,
        "prompt_mean": 10.0,
        "output_mean": 2.0,
        "seed": 0,
        "server_version": "1.2",
        "server_profile": "box",
        "machine": {"cpu": "2 x Chip", "system": "Linux"},
        "command": "python scripts/bench.py -m",
    }


def test_the_page_says_what_ran_and_sets_rates_beside_each_other() -> None:
    results = [
        result("dualpace", 1, 0.5),
        result("dualpace", 3, 1.5),  # 1 s/token at 2 requests/s
        result("gpu_only", 1, 0.5),
        result("gpu_only", 2, 1.5),  # at 1.5
    ]
    text = page(results, "Live", ["figure9.png"])
    assert text.startswith("# Live\n")
    assert text.count("python scripts/bench.py -m") == 1
    assert "| dualpace | 1.2 | measured | 2 x Chip, Linux | box |" in text
    assert "| dualpace | 2.00 |" in text and "| gpu_only | 1.50 |" in text
    assert "| dualpace / gpu_only | 1.333 x | - |" in text
    assert "| *the paper's, over vLLM* | 1.906 / 1.115 / 1.238 x | - | - | - | - |" in text
    assert "| dualpace | 2.00 | > 3 | " in text
    assert "| dualpace | 3 | 0.33 | 1 | 1.5000 | 1.500 | 1500.0 |" in text
    assert "| 50 % |" in text and "![figure9.png](figure9.png)" in text


def test_a_single_point_has_no_sustained_rates() -> None:
    assert "sustained" not in page([result("vllm", 1, 0.5)], "One")


def test_where_the_host_tier_does_not_help_is_said_plainly() -> None:
    results = [
        *(result("dualpace", rate, latency) for rate, latency in ((1, 0.5), (2, 1.2), (3, 1.0))),
        *(result("gpu_only", rate, 1.0) for rate in (1, 2, 3, 4)),
    ]
    results[2]["cpu_resident_tokens"] = 0
    text = page(results, "Live")
    assert "dualpace against gpu_only" in text
    assert "- s/token: **worse** at 2 (+20.0 %); better at 1 (-50.0 %); the same at 3 req" in text
    assert "- requests completed/s: **worse** at 2 (-16.7 %); better at 1 (+100.0 %); the" in text
    assert "- The host made no token at 3 requests/s." in text
    assert "against" not in page(results[:3], "Without another")
    assert "against" not in page([*results[:2], result("gpu_only", 9, 1.0)], "No common rate")


def test_of_code_the_paper_gives_no_gains() -> None:
    results = [result(policy, rate, 0.5) for policy in ("dualpace", "neo") for rate in (1, 2)]
    text = page([r | {"workload": "code"} for r in results], "Live")
    assert "the paper's, over" not in text and "The paper prints no gains for code" in text
    other = page([r | {"workload": "chat"} for r in results], "Live")
    assert "paper" not in other


def test_a_sweep_that_asks_for_no_figures_still_gets_its_page(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(result("vllm", 1, 0.5)))
    bench = {"out": str(tmp_path), "figures": [], "page": "all.md", "title": "Mine"}
    DrawFigures().on_job_end(OmegaConf.create({"bench": bench}), JobReturn())
    assert (tmp_path / "all.md").read_text().startswith("# Mine\n")
