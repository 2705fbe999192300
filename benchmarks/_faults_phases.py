"""Phases of a collective in which a rank dies or stops: every phase, over shared memory and over Gloo.

python -m benchmarks._faults_phases        every phase; rows 1 and 3 of the thirty faults have some of them
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks._fault_runs import Verdict, run_ranks
from benchmarks.faults import MOST_SECONDS, Row
from meshwright.comm import CommError, Communicator, init_process

_HERE = "benchmarks._faults_phases"
_LIMIT = 3.0
_ELEMENTS = 2**14
"""Elements of a tensor that moves by a transport, not in the frames that compare the call."""
_AT = "fault at "


def _patched_function(function: str) -> tuple[Any, str]:
    """Return the object and the name of the function in which rank 1 ends."""
    from meshwright.comm import torch_hooks
    from meshwright.comm.checking.call_guard import Guard
    from meshwright.comm.process import process_communicator
    from meshwright.comm.transport.control_links import ControlLinks
    from meshwright.comm.transport.shared_memory import SharedMemoryTransport

    return {
        "before the comparison": (Guard, "before"),
        "in the comparison": (ControlLinks, "receive"),
        "while a link opens": (ControlLinks, "wait_open"),
        "while the memory opens": (process_communicator, "open_shared"),
        "while the backend opens": (process_communicator, "open_backend"),
        "in the memory": (SharedMemoryTransport, "_meet"),
        "in the backend": (torch_hooks.Backend, "exchange"),
        "after the transfer": (Guard, "after"),
    }[function]


OVER_MEMORY = [
    "before the comparison",
    "in the comparison",
    "while a link opens",
    "while the memory opens",
    "in the memory",
    "after the transfer",
]
OVER_GLOO = ["while the backend opens", "in the backend"]


def ends_in(folder: str, where: str, number: str) -> None:
    """All-reduce twice; rank 1 sends itself a signal when it first reaches a place."""
    here = init_process(backend="gloo")
    if here.rank == 1:
        _end_in(where, int(number))
    error = _error(here)
    print(f"{_AT}{time.time()}: {error}", flush=True)
    if here.rank != 1:
        raise SystemExit(1)


def _end_in(where: str, number: int) -> None:
    owner, name = _patched_function(where)
    real: Callable[..., Any] = getattr(owner, name)

    def ends(*args: Any, **more: Any) -> Any:
        print(f"{_AT}{time.time()}", flush=True)
        os.kill(os.getpid(), number)
        return real(*args, **more)

    setattr(owner, name, ends)


def _error(here: Communicator) -> str:
    try:
        for _ in range(3):
            here.all_reduce(torch.ones(_ELEMENTS), "sum", tuple(range(here.size)))
    except CommError as error:
        return str(error)
    return "no error"


def phase(where: str, number: signal.Signals) -> Verdict:
    """Return the other ranks' errors about a rank that gets a signal in one phase, and the delay in seconds."""
    memory = "on" if where in OVER_MEMORY else "off"
    with TemporaryDirectory() as folder:
        env: Mapping[str, str] = {
            "MESHWRIGHT_LIMIT": f"{_LIMIT:g}",
            "MESHWRIGHT_SHARED_MEMORY": memory,
            "MESHWRIGHT_RECORDS": folder,
        }
        ended = run_ranks(f"{_HERE}:ends_in", 3, arguments=[where, str(int(number))], each=lambda rank: env, limit=60)
        written = [json.loads(path.read_text())["written"] for path in Path(folder).rglob("rank-*.json")]
    begin = _time(ended[1].output)
    living = [ended[0], ended[2]]
    seconds = [round(time - begin, 2) for time in written]
    word = "DeadPeerError" if number is signal.SIGKILL else "NoAnswerError"
    most = MOST_SECONDS if number is signal.SIGKILL else _LIMIT + MOST_SECONDS
    told = any(word in each.output and "rank 1" in each.output for each in living)
    good = told and all(each.status == 1 for each in living) and len(seconds) == 2 and max(seconds) <= most
    outputs = "" if good else "\n".join(f"[{each.rank}] {each.status} {each.output[-1200:]}" for each in living)
    return Verdict(good, f"{number.name} {where}{': ' if outputs else ''}{outputs}", max(seconds, default=None))


def _time(output: str) -> float:
    line = next((line for line in output.splitlines() if line.startswith(_AT)), "")
    return float(line.removeprefix(_AT).split(":")[0]) if line else 0.0


ROWS: dict[int, Row] = {}
"""No rows of its own: rows 1 and 3 run some of these phases."""


def main() -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for where in OVER_MEMORY + OVER_GLOO:
            found = phase(where, number)
            print("passed" if found.passed else "FAILED", found.seconds, found.found, flush=True)


if __name__ == "__main__":
    main()
