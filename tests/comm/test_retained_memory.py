"""Memory released by a step is reused by the next one, as counted by page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, torch
from meshwright.comm.process.retained_memory import keep_memory
keep_memory()

def step():
    return sum(float(torch.ones(n * 2**18)[0]) for n in (1, 4, 8, 3, 12, 64))

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    step()
before = pages()
step()
print(pages() - before)
"""


def pages(setting: str) -> int:
    """Return the number of pages that a step got from the system, in a process of its own."""
    env = {**os.environ, "MESHWRIGHT_KEEP_MEMORY": setting}
    ran = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, env=env)
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_step_reuses_the_pages_of_the_last_one() -> None:
    assert pages("off") > 1000
    assert pages("on") < 100
