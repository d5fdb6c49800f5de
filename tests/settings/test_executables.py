"""Which executables of a stage are worth timing on which CPU."""

import pytest

from dualpace.cpu import isa
from dualpace.errors import ConfigError
from dualpace.graphs.config import CompileConfig
from dualpace.settings import executables


@pytest.mark.parametrize(
    ("level", "ours"),
    [
        (isa.Level.AMX, ("amx", "inductor-amx")),
        (isa.Level.AVX512_BF16, ("avx512-bf16", "inductor-avx512-bf16")),
        (isa.Level.AVX512, ()),
        (isa.Level.AVX2, ()),
    ],
)
def test_products_on_tiles_are_timed_where_the_cpu_has_the_instructions(
    monkeypatch: pytest.MonkeyPatch, level: isa.Level, ours: tuple[str, ...]
) -> None:
    monkeypatch.setattr(isa, "detected", lambda: isa.Isa(level, ""))
    timed = executables._candidates("backend_cpu", CompileConfig(), "cpu", "bf16")
    assert timed == ("eager", "packed", "inductor-packed", *ours)
    in_float32 = executables._candidates("backend_cpu", CompileConfig(), "cpu", "float32")
    assert in_float32 == ("eager", "packed", "inductor-rows", "inductor-packed")


def test_a_backend_of_the_other_dtype_is_refused() -> None:
    for name, dtype in (("inductor-rows", "bf16"), ("amx", "float32")):
        config = CompileConfig(backend_cpu=name)
        with pytest.raises(ConfigError, match=f"compile.backend_cpu={name} multiplies"):
            executables._candidates("backend_cpu", config, "cpu", dtype)
