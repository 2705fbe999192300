"""Real processes with a fault: started together, disturbed by a function, and watched until the last one ends.

A rank is `python -c "from MODULE import NAME; NAME(*arguments)"` with torchrun's variables in its environment. It
writes to a file of its own, from which `Ended.output` comes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from meshwright.comm.launcher.rendezvous import host_store

ROOT = Path(__file__).parents[1]
LIMIT = 30.0
FAULT = "fault"
"""Name of the file that a rank makes at the moment of its fault, if the fault is its own."""


def mark_fault(folder: str) -> None:
    """Record the current time as the time of this run's fault; only the first rank's call counts."""
    with suppress(FileExistsError):
        (Path(folder) / FAULT).touch(exist_ok=False)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a rank: exit status (negative for a signal), all its output, and seconds from the fault to its end."""

    rank: int
    status: int
    output: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a row: passed or not, observations, and the seconds until the last living rank knew."""

    passed: bool
    found: str
    seconds: float | None = None


@dataclass(slots=True)
class Ranks:
    """The running processes of one run; `folder` is for the files of the run."""

    processes: list[subprocess.Popen[bytes]]
    folder: Path
    fault_at: float = 0.0
    is_marked: bool = False

    def wait_for(self, name: str, limit: float = LIMIT) -> Path:
        """Return the file `name` in the folder as soon as a rank has made it; AssertionError after `limit` seconds."""
        end = time.monotonic() + limit
        while not (self.folder / name).exists():
            assert time.monotonic() < end, f"no rank made {name} within {limit} s"
            assert any(p.poll() is None for p in self.processes), f"all ranks ended before {name}"
            time.sleep(0.01)
        return self.folder / name

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, and record the time of the fault."""
        self.fault_at = time.monotonic()
        self.processes[rank].send_signal(number)


def run_ranks(
    function: str,
    ranks: int,
    fault: Callable[[Ranks], object] | None = None,
    arguments: Sequence[str] = (),
    each: Callable[[int], Mapping[str, str]] | None = None,
    limit: float = LIMIT,
    also: Callable[[Ranks], object] | None = None,
) -> list[Ended]:
    """Return how each rank ended; ranks that are left after `limit` seconds are killed (status -9).

    `function` is "module:name". `fault` disturbs the run. `each(rank)` gives variables of a rank's environment. `also`
    looks at the folder after the end. The folder is the first argument of the function.
    """
    module, _, name = function.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        store = host_store("127.0.0.1", 0, ranks, timedelta(minutes=1))
        run = Ranks([], Path(folder))
        code = f"import sys; from {module} import {name}; {name}(*sys.argv[1:])"
        command = [sys.executable, "-c", code, folder, *arguments]
        base, attempt = _variables(ranks, store.port), uuid4().hex[:12]
        for rank in range(ranks):
            env = base | {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": attempt}
            env |= each(rank) if each is not None else {}
            with open(run.folder / f"output.{rank}", "wb") as output:
                run.processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=output, stderr=output))
        run.fault_at = time.monotonic()
        try:
            if fault is not None:
                fault(run)
            ended = _ends(run, limit)
        finally:
            for process in run.processes:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()
        if also is not None:
            also(run)
        return ended


def _variables(ranks: int, port: int) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _ends(run: Ranks, limit: float) -> list[Ended]:
    """Wait for every rank, and return how each of them ended."""
    end, times = run.fault_at + limit, dict[int, float]()
    while len(times) < len(run.processes) and time.monotonic() < end:
        if (run.folder / FAULT).exists() and not run.is_marked:
            run.is_marked, run.fault_at = True, time.monotonic()
            end = run.fault_at + limit  # the start takes long on a machine with other work
        for rank, process in enumerate(run.processes):
            if rank not in times and process.poll() is not None:
                times[rank] = time.monotonic() - run.fault_at
        time.sleep(0.01)
    found: list[Ended] = []
    for rank, process in enumerate(run.processes):
        if process.poll() is None:
            process.kill()
        status = process.wait()
        text = (run.folder / f"output.{rank}").read_text(errors="replace")
        found.append(Ended(rank, status, text, round(times.get(rank, limit), 2)))
    return found
