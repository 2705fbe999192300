"""A plugin of pytest that writes the processor seconds of each test as JSON, with its fixtures and its processes."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

FILE = "MESHWRIGHT_TEST_SECONDS"
"""Environment variable with the path of the file that is written."""
_PROPERTY = "processor seconds"
_seconds: dict[str, float] = {}


def _processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_STARTED] = _processor_seconds()
    return (yield)


_STARTED = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append((_PROPERTY, _processor_seconds() - item.stash[_STARTED]))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the seconds; with pytest-xdist, reports arrive in the process that writes the file."""
    for name, value in report.user_properties:
        if name == _PROPERTY:
            _seconds[report.nodeid] = float(str(value))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        Path(os.environ[FILE]).write_text(json.dumps(_seconds, indent=0))
