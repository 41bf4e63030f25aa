"""How much memory grammars take in the engine process.

The library reports no sizes, and a client chooses the grammars: one of 20 bytes may hold 20 MB, and so may a generation
of an ambiguous one. So they are measured together: as the memory that the process has allocated since there were none.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2` (mallinfo(3)), whose other fields are not used here."""

    _fields_ = [
        ("before", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("between", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("after", ctypes.c_size_t * 2),
    ]


_LIBC = ctypes.CDLL(None)
if hasattr(_LIBC, "mallinfo2"):
    _LIBC.mallinfo2.restype = _MallocInfo


def return_free_pages() -> None:
    """Give freed memory back to the system. A thread cannot reuse what is free in another thread's heap."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def allocated_bytes() -> int:
    """Return the bytes that the C library has allocated, or the resident bytes if it does not report them."""
    if hasattr(_LIBC, "mallinfo2"):
        info = _LIBC.mallinfo2()
        return int(info.uordblks + info.hblkhd)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
