"""What this CPU really can do, and which kernels that means.

AMX is believed only after a child process has used it. This file imports no tensor library and
runs no kernel.
"""

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dualpace.cpu import amx_probe
from dualpace.errors import ConfigError

_AMX_FLAGS = {"amx_tile", "amx_bf16"}
# What the 512-bit kernels use beyond avx512f; every CPU with bf16 instructions has them.
_AVX512_FLAGS = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


class Level(StrEnum):
    """Families of kernels, each needing what the ones before it need."""

    PORTABLE = "portable"  # 8 lanes, whatever the compiler makes of them
    AVX2 = "avx2"  # 8 lanes, fused multiply-add
    AVX512 = "avx512"  # 16 lanes
    AVX512_BF16 = "avx512_bf16"  # 32 bf16 products an instruction
    AMX = "amx"  # tile products for dense stages; attention as AVX512_BF16


_ORDER = list(Level)


@dataclass(frozen=True, slots=True)
class Isa:
    """The level in use, and the sentence that says why."""

    level: Level
    reason: str

    def has(self, level: Level) -> bool:
        return _ORDER.index(self.level) >= _ORDER.index(level)


def detect(
    override: str | None = None,
    cpuinfo: Path = Path("/proc/cpuinfo"),
    try_amx: Callable[[], str | None] | None = None,
) -> Isa:
    """The best level of this CPU, or `override` if the CPU has it.

    try_amx: returns None if a tile instruction works, else why not; the default starts a child
    process. Raises ConfigError for an unknown level and for one above what the CPU has.
    """
    if override is not None and override not in _ORDER:
        raise ConfigError(
            f"the CPU instruction level is {override!r}; use one of {', '.join(_ORDER)}, "
            "or leave it out"
        )
    flags = cpu_flags(cpuinfo)
    level, reason = _best(flags, try_amx or amx_failure, override)
    if override is None:
        return Isa(level, reason)
    wanted = Level(override)
    if _ORDER.index(wanted) > _ORDER.index(level):
        raise ConfigError(
            f"the CPU instruction level is {wanted}, but this CPU has only {level} ({reason}); "
            f"use {level} or a lower one, or leave it out"
        )
    return Isa(wanted, f"{wanted} kernels, as configured; the CPU could do {level}")


@functools.cache
def detected() -> Isa:
    """What this CPU can do, found out once a process."""
    return detect()


def _best(
    flags: frozenset[str], try_amx: Callable[[], str | None], override: str | None
) -> tuple[Level, str]:
    if not {"avx2", "fma"} <= flags:
        return Level.PORTABLE, "portable kernels: the CPU has no AVX2 with fused multiply-add"
    if not flags >= _AVX512_FLAGS:
        return Level.AVX2, "avx2 kernels: the CPU has no AVX-512"
    if "avx512_bf16" not in flags:
        return Level.AVX512, "avx512 kernels: the CPU has AVX-512 but no bf16 instructions"
    if not flags >= _AMX_FLAGS:
        return Level.AVX512_BF16, "avx512_bf16 kernels: the CPU has no AMX tiles"
    if override not in (None, Level.AMX):
        return Level.AMX, "the CPU lists AMX, which was not tried"
    failure = try_amx()
    if failure is not None:
        return Level.AVX512_BF16, f"avx512_bf16 kernels: the CPU lists AMX, but {failure}"
    return Level.AMX, "amx kernels for dense stages: a tile instruction was tried and is right"


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature names of the first CPU, as Linux spells them."""
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def amx_failure() -> str | None:
    """Why AMX cannot be used here, or None; tried in a child process."""
    command = [sys.executable, "-I", "-S", amx_probe.__file__]
    try:
        code = subprocess.run(command, capture_output=True, timeout=30, check=False).returncode
    except subprocess.TimeoutExpired:
        return "trying it did not end"
    if code < 0:
        return f"trying it ended with signal {-code}"
    return None if code == 0 else "the kernel does not grant it"


def has_avx512() -> bool:
    """Whether the CPU has the parts of AVX-512 that kernels use."""
    return cpu_flags() >= _AVX512_FLAGS


def has_bf16() -> bool:
    """Whether the CPU has bf16 instructions (not merely bf16 storage)."""
    return bool({"avx512_bf16", "amx_bf16"} & cpu_flags())
