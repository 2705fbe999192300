"""Work without Python's garbage collector, for phases that make many objects and keep most of them.

Each full collection visits all objects of the process, about 0.3 s where transformers is imported, and a first step
would start several. What such phases drop is freed by reference counts; the few cycles wait for the next collection.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Generator[None]:
    """Inside, no collection starts by itself."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
