"""Large pages for the memory of a process that forks often: a fork copies the table of all pages that it has.

With 2 MiB in a page, as Linux makes of small ones from 6.1 on, the table of a process that has imported torch and
collected all tests is a hundredth as long. A process that is forked still copies no more than the 4 KiB that it writes.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

__all__ = ["use_large_pages"]

_LARGE = 1 << 21
_MADV_COLLAPSE = 25
_MAPPING = re.compile(r"(\w+)-(\w+) rw.p \w+ \w+:\w+ 0 +(\[heap\])?$", re.MULTILINE)  # of memory, and not of a file


def use_large_pages() -> None:
    """Have the kernel put what this process has allocated into large pages; what it does not, stays as it is."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for mapping in _MAPPING.finditer(Path("/proc/self/maps").read_text()):
        first, end = (int(address, 16) // _LARGE * _LARGE for address in mapping.group(1, 2))
        first += _LARGE * (first < int(mapping[1], 16))
        if first < end:
            madvise(first, end - first, _MADV_COLLAPSE)
