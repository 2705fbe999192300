"""Run tests by name, one a line of the standard input; write the reports of each as one line of JSON.

The arguments are those of pytest: the files that contain the tests, and options.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

import pytest

_LIMIT = 100  # seconds; less than the limit of the parent, which waits for the report
_OPTIONS = ["-q", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={_LIMIT}"]


class _Server:
    """Plugin that runs the named tests in place of all that were collected."""

    def __init__(self, names: TextIO, answers: TextIO) -> None:
        self._names, self._answers = names, answers
        self._reports: list[dict[str, Any]] = []
        self._config: pytest.Config | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._config = session.config
        items = {item.nodeid: item for item in session.items}
        for line in self._names:
            item = items[line.rstrip("\n")]
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            self._answers.write(json.dumps(self._reports) + "\n")
            self._answers.flush()
            self._reports.clear()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self._config is not None
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def main() -> None:
    # copies, because pytest captures the originals; what tests print must not mix with the answers
    with os.fdopen(os.dup(0)) as names, os.fdopen(os.dup(1), "w") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        pytest.main([*_OPTIONS, *sys.argv[1:]], plugins=[_Server(names, answers)])


if __name__ == "__main__":
    main()
