"""Two GPUs compute what one does: captured decode steps with NCCL, and with sums in the kernels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_tp.py"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_two_gpus_compute_what_one_does() -> None:
    sections = "sections=correctness,correctness_of_peers"
    command = [sys.executable, str(SCRIPT), "device=cuda", sections, "limit_s=300"]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    result = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 0, result
    for form in ("nccl", "peers"):
        assert result[f"checked {form} float32"]["same_on_all_ranks"]
