"""The fixture `mesh_device`, and the process in which its tests run.

The devices cannot be unregistered, and they change the results of `torch.accelerator` in all other code. So tests that
use the fixture run in a child process, one for all such tests of a session. The child starts with the first of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from .build import build

IN_CHILD = "MESHWRIGHT_TEST_DEVICE"
_FIXTURE = "mesh_device"
_child = pytest.StashKey["Child"]()
_failed_build = pytest.StashKey[str]()


@pytest.fixture
def mesh_device() -> Generator[Any]:
    """Devices `mesh:0` to `mesh:3`; the test fails if it leaves a race or a touch of device memory by the host."""
    import torch

    from .inspection import Devices

    devices = Devices()
    yield devices
    for device in range(devices.count):
        torch.accelerator.synchronize(device)
    races, touches = devices.take_races(), devices.take_host_touches()
    assert not races, "races:\n" + "\n".join(map(str, races))
    assert not touches, f"the host touched {touches} pages of device memory"


def _uses_devices(item: pytest.Item) -> bool:
    return _FIXTURE in getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the devices before the first test, whose time limit would include the build."""
    here = Path(__file__).parent
    if session.config.option.collectonly or not any(_uses_devices(i) or here in i.path.parents for i in session.items):
        return
    try:
        build()
    except RuntimeError as error:  # fails each test that uses the devices, and no other
        session.config.stash[_failed_build] = str(error)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test that uses the fixture in the child, and report what the child reports."""
    if not _uses_devices(item) or IN_CHILD in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # of what the test before this one has left for it
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    if _child in config.stash:
        config.stash[_child].close()


def _reports(item: pytest.Item) -> list[Any]:
    config = item.config
    if _failed_build in config.stash:
        return [_failure(item, config.stash[_failed_build])]
    if _child not in config.stash or not config.stash[_child].alive:
        config.stash[_child] = Child(config, sorted({str(i.path) for i in item.session.items if _uses_devices(i)}))
    try:
        found = config.stash[_child].run(item.nodeid)
    except pytest.fail.Exception as error:  # the time limit
        config.stash[_child].process.kill()
        return [_failure(item, str(error))]
    if found is None:
        code = config.stash[_child].process.wait()
        return [_failure(item, f"the process of the test device ended with code {code}")]
    return [config.hook.pytest_report_from_serializable(config=config, data=each) for each in found]


def _failure(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")


class Child:
    """The process that runs the tests of the device, those of the given files."""

    def __init__(self, config: pytest.Config, files: list[str]) -> None:
        options = ["--hypothesis-profile=ci"] if config.getoption("--hypothesis-profile", None) == "ci" else []
        paths = os.pathsep.join([str(config.rootpath), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.device.child", *files, *options],
            cwd=config.rootpath,
            env={**os.environ, IN_CHILD: "1", "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def run(self, nodeid: str) -> list[dict[str, Any]] | None:
        """Return the reports of a test; None if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(nodeid + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
