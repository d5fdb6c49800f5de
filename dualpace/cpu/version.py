"""A number that changes with the source of the kernels.

Numba notices a change of the file that a cached function stands in, not of the files that it is
generated from. Kernels therefore carry this number, and cache folders may be named after it.
"""

import functools
import zlib
from pathlib import Path

_SOURCES = (
    *("vector_ir", "block_ir", "primitives", "plan"),
    *("amx_ir", "amx_rope_ir", "vector_gemm_ir", "tile_block_ir", "few_rows_ir"),
)


@functools.cache
def source_version() -> int:
    """31 bits of the sources that kernels are generated from."""
    folder = Path(__file__).parent
    text = b"".join((folder / f"{name}.py").read_bytes() for name in _SOURCES)
    return zlib.crc32(text) & 0x7FFFFFFF
