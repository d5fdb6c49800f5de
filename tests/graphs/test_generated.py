"""What Inductor wrote runs without it, or is refused when it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dualpace.graphs.backends import generated

SOURCE = """
from torch._inductor.select_algorithm import extern_kernels
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu

class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        assert_size_stride(arg0_1, (2, 3), (3, 1), 'input')
        buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
        # Original ATen: [aten.mm]
        extern_kernels.mm(arg0_1, reinterpret_tensor(arg1_1, (3, 2), (1, 3), 0), out=buf0)
        del arg1_1
        return (buf0, )
"""


def test_a_function_runs_from_its_text(tmp_path: Path) -> None:
    generated.save(SOURCE, {}, tmp_path / "graph", tmp_path)
    run = generated.load(tmp_path / "graph", tmp_path)
    x, weight = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(run(x, None, weight), x @ weight.T)
    with pytest.raises(AssertionError):
        run(x[:1], None, weight)
    assert "Original ATen" in (tmp_path / "graph").read_text()  # for who reads it


@pytest.mark.parametrize(
    ("used", "named"), [("extern_kernels.mm", "extern_kernels.conv"), ("empty_strided_cpu", "run")]
)
def test_what_a_loaded_function_would_lack_is_named(used: str, named: str, tmp_path: Path) -> None:
    source = SOURCE.replace(f"{used}(", f"{named}(")
    with pytest.raises(RuntimeError, match=f"uses {named},"):
        generated.save(source, {}, tmp_path / "graph", tmp_path)
    assert not (tmp_path / "graph").exists()
