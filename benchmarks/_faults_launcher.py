"""Row 14 at the launcher: repeated signals, and a launcher that is killed, leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from benchmarks._fault_runs import ROOT, Verdict
from benchmarks._faults_resume import asked_to_stop_again
from benchmarks.faults import MOST_SECONDS, Row

SCRIPT = """
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path

folder, what = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"], start_new_session=rank == "1")

def save(number, frame):
    (folder / f"part.{rank}").touch()
    time.sleep(1.5)
    (folder / f"part.{rank}").rename(folder / f"saved.{rank}")
    sys.exit(0)

if what == "saves":
    signal.signal(signal.SIGTERM, save)
elif what == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"pids.{rank}.part").write_text(f"{os.getpid()} {child.pid}")
(folder / f"pids.{rank}.part").rename(folder / f"pids.{rank}")
if what == "holds":
    ctypes.PyDLL(None).sleep(120)
if what == "ends":
    sys.exit(0)
time.sleep(120)
"""
LAUNCHER = "import sys; from meshwright.comm import launch; sys.exit(launch(sys.argv[1:], 2))"
Signals = Callable[[subprocess.Popen[bytes]], None]


def _twice(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()


def _nothing(process: subprocess.Popen[bytes]) -> None:
    return


CASES: dict[str, tuple[str, Signals, int]] = {
    "SIGTERM twice while ranks save": ("saves", _twice, 128 + signal.SIGTERM),
    "SIGTERM twice": ("computes", _twice, 128 + signal.SIGTERM),
    "SIGKILL of the launcher": ("computes", _kill, -signal.SIGKILL),
    "SIGKILL of the launcher, ranks ignore SIGTERM": ("ignores", _kill, -signal.SIGKILL),
    "SIGKILL of the launcher, ranks hold the lock": ("holds", _kill, -signal.SIGKILL),
    "ranks end and leave processes": ("ends", _nothing, 0),
}


def launch_case(what: str, signals: Signals, expected: int) -> tuple[bool, str, float]:
    """Return whether all processes ended and the save is complete, observations, and the seconds until all ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, "-c", LAUNCHER, str(folder / "script.py"), name, what]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        pids = _pids(folder)
        begin = time.monotonic()
        signals(process)
        while any(map(_lives, pids)) and time.monotonic() - begin < 15:
            time.sleep(0.02)
        seconds, left = round(time.monotonic() - begin, 2), [pid for pid in pids if _lives(pid)]
        status = process.wait(60)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        saved = len(list(folder.glob("saved.*"))) if what == "saves" else 2
    good = status == expected and not left and saved == 2
    return good, f"status {status}, {len(left)} of {len(pids)} processes left, {saved} of 2 saved", seconds


def _pids(folder: Path) -> list[int]:
    end = time.monotonic() + 60
    while len(found := [path for path in folder.glob("pids.*") if path.suffix != ".part"]) < 2:
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.02)
    return [int(word) for path in found for word in path.read_text().split()]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def signalled_twice() -> Verdict:
    """SIGTERM many times to ranks and to their launcher: the save is complete, and no process is left after 5 s."""
    ranks, launcher = asked_to_stop_again(), _signals_to_the_launcher()
    return Verdict(ranks.passed and launcher.passed, f"{ranks.found}; {launcher.found}", launcher.seconds)


def _signals_to_the_launcher() -> Verdict:
    found = {name: launch_case(*case) for name, case in CASES.items()}
    worst = max(seconds for _, _, seconds in found.values())
    said = "; ".join(f"{name}: {text}, {seconds} s" for name, (_, text, seconds) in found.items())
    return Verdict(all(good for good, *_ in found.values()) and worst <= MOST_SECONDS, said, worst)


ROWS: dict[int, Row] = {14: signalled_twice}
