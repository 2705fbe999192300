"""Memory that a process keeps from one training step to the next.

The C library gives freed memory back to the system, which hands it out again page by page, each filled with zeros: a
step that allocates as much as the last one then pays for thousands of pages. Accelerators have caching allocators.
"""

from __future__ import annotations

import ctypes
import os
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's `mallopt`: how much may lie free at the heap's end, and from which size on blocks lie apart."""
KEPT = 2**31 - 1
APART = 2**30


def keep_memory() -> bool:
    """Has this process keep freed memory, up to 2 GiB; False without glibc and with MESHWRIGHT_KEEP_MEMORY=off."""
    if platform.libc_ver()[0] != "glibc" or os.environ.get("MESHWRIGHT_KEEP_MEMORY") == "off":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_THRESHOLD, APART)) and bool(mallopt(TRIM_THRESHOLD, KEPT))
