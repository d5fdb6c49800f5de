"""Run as a script: ask the kernel for AMX and try one tile multiplication; exit code 0 if its
result is right.

A child process runs it, because a machine may list the tile unit and still kill the program that
touches it. It imports nothing but the standard library and knows nothing about who asks.
"""

import ctypes
import mmap
import struct
import sys
from collections.abc import Sequence

# void f(config, a, b, stride, out): ldtilecfg [rdi]; tileloadd tmm1, [rsi+rcx]; tileloadd tmm2,
# [rdx+rcx]; tilezero tmm0; tdpbf16ps tmm0, tmm1, tmm2; tilestored [r8+rcx], tmm0; tilerelease;
# ret
_CODE = bytes.fromhex(
    "c4e2784907 c4e27b4b0c0e c4e27b4b140a c4e27b49c0 c4e26a5cc1 c4c27a4b0408 c4e27849c0 c3"
)
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def request_permission() -> bool:
    """Ask the kernel for the tile registers, for this process and the threads it starts from now
    on.
    """
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def tile_config(sizes: Sequence[tuple[int, int]] = ((16, 64),) * 8) -> bytes:
    """Palette 1 with eight tiles of these rows and bytes a row."""
    rows, widths = zip(*sizes, strict=True)
    return struct.pack("<BB14x16H16B", 1, 0, *widths, *[0] * 8, *rows, *[0] * 8)


def multiply_ones() -> bool:
    """One bf16 tile product of ones: each of the 256 sums must be 32."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(_CODE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    config = ctypes.create_string_buffer(tile_config(), 64)
    ones = (ctypes.c_uint16 * 512)(*[0x3F80] * 512)
    out = (ctypes.c_float * 256)()
    pointer = ctypes.c_void_p
    function = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, ctypes.c_int64, pointer)(address)
    function(
        ctypes.addressof(config),
        ctypes.addressof(ones),
        ctypes.addressof(ones),
        64,
        ctypes.addressof(out),
    )
    return list(out) == [32.0] * 256


if __name__ == "__main__":
    sys.exit(0 if request_permission() and multiply_ones() else 1)
