"""The launcher of local processes: its exit status, and signals that it forwards to every rank."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from benchmarks._faults_launcher import CASES, launch_case
from meshwright.comm import launch

LISTENER = """
import os, signal, sys, time
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]

def ended(number, frame):
    (folder / f"signal-{rank}").write_text(str(number))
    sys.exit(0)

signal.signal(signal.SIGTERM, ended)
(folder / f"ready-{rank}").touch()
time.sleep(60)
"""


def test_a_run_beyond_its_limit_has_the_status_of_timeout() -> None:
    assert launch(["-c", "import time; time.sleep(60)"], 2, timeout=0.5) == 124


def test_the_status_is_0_or_that_of_the_failed_rank() -> None:
    assert launch(["-c", "pass"], 2, timeout=30) == 0
    assert launch(["-c", "import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)"], 2, timeout=30) == 7


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals of POSIX")
def test_a_signal_to_the_launcher_goes_to_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LISTENER)

    def send() -> None:
        while sum(1 for _ in tmp_path.glob("ready-*")) < 2:
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert launch([str(script), str(tmp_path)], 2, timeout=60) == 128 + signal.SIGTERM
    assert {p.name for p in tmp_path.glob("signal-*")} == {"signal-0", "signal-1"}


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="the system has no /proc")
@pytest.mark.parametrize("case", ["SIGTERM twice while ranks save", "SIGKILL of the launcher, ranks hold the lock"])
def test_no_process_outlives_the_launcher(case: str) -> None:
    good, found, _ = launch_case(*CASES[case])
    assert good, found
