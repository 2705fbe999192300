"""Memory that a process keeps from one training step to the next.

The C library returns freed memory to the system, which hands it out again page by page, each filled with zeros. So
every step pays again for thousands of pages. Accelerators have caching allocators; this module is for the CPU.
"""

from __future__ import annotations

import ctypes
import os
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`.

They set the free bytes kept at the end of the heap, and the size from which a block gets its own mapping.
"""
KEPT = 2**31 - 1
APART = 2**30


def keep_memory() -> bool:
    """Keep freed memory in this process, up to 2 GiB; return True if that works.

    False without glibc, and with MESHWRIGHT_KEEP_MEMORY=off.
    """
    if platform.libc_ver()[0] != "glibc" or os.environ.get("MESHWRIGHT_KEEP_MEMORY") == "off":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_THRESHOLD, APART)) and bool(mallopt(TRIM_THRESHOLD, KEPT))
