"""Backends on tiles for whatever this machine has: the unit itself, or the stand-in for it."""

from dualpace.cpu.gemm import Unit
from dualpace.cpu.isa import Level, detected
from dualpace.graphs.backends.tiles import Amx, Avx512Bf16, Tiles

HAS_AMX = detected().has(Level.AMX)
AMX = Unit(True, HAS_AMX)
VECTORS = Unit(False, detected().has(Level.AVX512_BF16))


class HereAmx(Amx):
    """`amx`."""

    def __init__(self) -> None:
        super().__init__(Tiles(AMX))

    def check(self, dtype: str) -> None:
        assert dtype == "bf16"


class HereVectors(Avx512Bf16):
    """`avx512-bf16`."""

    def __init__(self) -> None:
        super().__init__(Tiles(VECTORS))

    def check(self, dtype: str) -> None:
        assert dtype == "bf16"


BACKENDS = {"amx": f"{__name__}:HereAmx", "avx512-bf16": f"{__name__}:HereVectors"}
