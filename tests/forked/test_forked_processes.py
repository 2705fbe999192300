"""A forked program behaves like a started one: arguments, environment, folder, streams, signals and status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .popen import Server

SHOWN = "import os, sys; print(__name__, sys.argv[1:], os.getcwd(), os.environ['SHOWN'], sys.stdin.read(), sys.path[0])"
END = "; sys.exit(3)"


@pytest.mark.parametrize("kind", ["text", "script", "module"])
def test_a_forked_program_is_like_a_started_one(kind: str, tmp_path: Path, fork_server: Server) -> None:
    (tmp_path / "shown.py").write_text(SHOWN + END)
    line = {"text": ["-c", SHOWN + END], "script": [str(tmp_path / "shown.py")], "module": ["-m", "shown"]}[kind]

    def run() -> tuple[int, str, str]:
        found = subprocess.run(
            [sys.executable, *line, "one", "two"],
            cwd=tmp_path,
            env=os.environ | {"SHOWN": "here"},
            input="typed",
            capture_output=True,
            text=True,
            check=False,
        )
        return found.returncode, found.stdout, found.stderr

    started = run()
    with fork_server.forking():
        forked = run()
    assert forked == started
    assert started[0] == 3


def test_an_error_and_a_signal_give_their_status(fork_server: Server) -> None:
    with fork_server.forking():
        failed = subprocess.run([sys.executable, "-c", "1 / 0"], capture_output=True, text=True, check=False)
        assert failed.returncode == 1
        assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL


def test_values_that_imports_read_are_those_of_a_started_process(fork_server: Server) -> None:
    with fork_server.forking():
        found = subprocess.run(
            [sys.executable, "-c", "import sys; print('torch' in sys.modules)"],
            env=os.environ | {"TORCH_LOGS": "+dynamo"},
            capture_output=True,
            text=True,
            check=True,
        )
    assert found.stdout == "False\n"
