"""Settings for all tests: hypothesis profiles, the test device, no seeds of absent devices, one thread per process.

`ci` draws few examples, always the same; `dev` draws new ones each time; `long` takes a night.
Choose with `pytest --hypothesis-profile=NAME`; without it `dev` is used.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

from tests.device.fixture import mesh_device, pytest_collection_finish, pytest_runtest_protocol, pytest_unconfigure
from tests.forked.popen import fork_server, forked_processes

# for pytest, which finds hooks and fixtures by name
__all__ = [
    "fork_server",
    "forked_processes",
    "mesh_device",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_runtest_protocol",
    "pytest_unconfigure",
]

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "ci", max_examples=25, derandomize=True, database=None, deadline=None, suppress_health_check=_SLOW
)
settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("long", max_examples=2000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile("dev")

for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():  # otherwise each torch.manual_seed stores a stack trace for it: 0.4 ms
        device.manual_seed_all = lambda seed: None
torch.set_num_threads(1)
os.environ["MESHWRIGHT_PROGRAMS"] = "off"  # tests do not share recorded programs
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles this package: 0.7 s


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out a module whose import registers the test devices in this process."""
    registers = (("device", "registered.py"), ("vendor", "made_up_vendor.py"))
    return True if collection_path.parts[-2:] in registers else None


def pytest_collection_modifyitems() -> None:
    """Exempt the modules that are loaded by now from garbage collection, which would take 0.3 s each time."""
    gc.collect()
    gc.freeze()
