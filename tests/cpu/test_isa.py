"""Which kernels are chosen for which CPU, and that AMX is believed only when tried."""

from pathlib import Path

import pytest

from dualpace.cpu import amx_probe
from dualpace.cpu.isa import Level, amx_failure, cpu_flags, detect
from dualpace.errors import ConfigError

AVX2 = "avx2 fma"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"
BF16 = f"{AVX512} avx512_bf16"
AMX = f"{BF16} amx_tile amx_bf16"


def cpuinfo(tmp_path: Path, flags: str) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\n")
    return path


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("sse2", Level.PORTABLE),
        (AVX2, Level.AVX2),
        (f"{AVX2} avx512f", Level.AVX2),
        (AVX512, Level.AVX512),
        (BF16, Level.AVX512_BF16),
        (AMX, Level.AMX),
    ],
)
def test_level_by_flags(tmp_path: Path, flags: str, level: Level) -> None:
    isa = detect(None, cpuinfo(tmp_path, flags), lambda: None)
    assert isa.level == level
    assert isa.reason.startswith(level)


def test_amx_that_does_not_work_is_not_used(tmp_path: Path) -> None:
    isa = detect(None, cpuinfo(tmp_path, AMX), lambda: "trying it ended with signal 4")
    assert isa.level == Level.AVX512_BF16
    assert "signal 4" in isa.reason


def test_amx_is_not_tried_when_a_lower_level_is_asked_for(tmp_path: Path) -> None:
    def never() -> str:
        raise AssertionError("tried")

    isa = detect("avx512", cpuinfo(tmp_path, AMX), never)
    assert isa.level == Level.AVX512
    assert isa.has(Level.AVX2) and not isa.has(Level.AVX512_BF16)


def test_override_above_the_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"amx, but this CPU has only avx2"):
        detect("amx", cpuinfo(tmp_path, AVX2))
    with pytest.raises(ConfigError, match="use one of"):
        detect("sse9", cpuinfo(tmp_path, AVX2))


def test_child_probe_agrees_with_the_flags_here() -> None:
    failure = amx_failure()
    if not {"amx_tile", "amx_bf16"} <= cpu_flags():
        assert failure is not None
    assert failure is None or failure


def test_tile_config_is_what_the_hardware_expects() -> None:
    config = amx_probe.tile_config()
    assert len(config) == 64
    assert config[0] == 1
    assert config[16:32] == (64).to_bytes(2, "little") * 8
    assert config[48:56] == bytes([16] * 8)
