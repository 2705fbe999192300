"""Row 27: processes that are no ranks connect to the store and to the ranks of a run."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks._fault_runs import Ranks, Verdict, run_ranks
from benchmarks.faults import Row
from meshwright.comm import init_process
from meshwright.comm.torch_hooks import TCPStore

_HERE = "benchmarks._faults_strangers"
_IDLE, _BURST = 12, 80
PAUSE = 26.0
_HELLO = 16 + 1 + 4 + 64


def steps_with_a_pause(folder: str, seconds: str) -> None:
    """Run steps with a new pair of ranks after a pause of rank 1; the folder gets the ranks' ports."""
    here = init_process(backend="gloo")
    group, ready = tuple(range(here.size)), Path(folder) / f"ready.{here.rank}"
    here.all_reduce(torch.ones(4), "sum", group)
    part = Path(folder) / f"part.{here.rank}"
    part.write_text(f"{os.environ['MASTER_PORT']} {_ports()}")
    part.rename(ready)
    if here.rank == 1:
        time.sleep(float(seconds))
    for step in range(20):
        pair = (step % 3, (step + 1) % 3)
        if here.rank in pair:
            here.all_reduce(torch.ones(4), "sum", pair)
        here.all_reduce(torch.ones(4), "sum", group)
    print("done", flush=True)


def _ports() -> str:
    """Return the ports on which this process listens."""
    inodes: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").rstrip("]"))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return " ".join(str(int(line[1].split(":")[1], 16)) for line in lines if line[3] == "0A" and line[9] in inodes)


@contextmanager
def strangers(store: int, ports: list[int]) -> Generator[list[str]]:
    """Attack inside the context: idle connections, wrong tokens and garbage at every port, wrong keys in the store."""
    found: list[str] = []
    wires: list[socket.socket] = []
    for port in [store, *ports]:
        for data in [b""] * _IDLE + [os.urandom(_HELLO), b"GET / HTTP/1.0\r\n\r\n", os.urandom(5000), b"\0" * _HELLO]:
            wire = socket.create_connection(("127.0.0.1", port), timeout=5)
            with suppress(OSError):
                wire.sendall(data)
            wires.append(wire)
    client = TCPStore("127.0.0.1", store, None, False, timedelta(seconds=10))
    for key in ("at/1", "ended/0", "token", "failures"):
        client.set(f"meshwright/another-job/0/{key}", "stray")
        client.delete_key(f"meshwright/another-job/0/{key}")
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    found.append(f"{len(wires)} connections {run}".strip())
    try:
        yield found
    finally:
        for wire in wires:
            wire.close()


def stray_clients() -> Verdict:
    """Idle connections, wrong tokens, garbage and keys of another job do not touch a run, which pauses for 26 s."""
    return stray_run(PAUSE)


def stray_run(pause: float) -> Verdict:
    """Return the outcome of a run with strangers and a pause of one rank."""

    def fault(run: Ranks) -> None:
        told = [run.wait_for(f"ready.{rank}").read_text().split() for rank in range(3)]
        ports = [int(port) for _, *of_rank in told for port in of_rank]
        with strangers(int(told[0][0]), ports):
            end = time.monotonic() + pause + 10
            while any(process.poll() is None for process in run.processes) and time.monotonic() < end:
                _burst(ports)
                time.sleep(0.5)

    ended = run_ranks(f"{_HERE}:steps_with_a_pause", 3, fault, arguments=[f"{pause:g}"], limit=pause + 30)
    good = all(each.status == 0 and each.output == "done\n" for each in ended)
    found = "unaffected" if good else "\n".join(f"[{each.rank}] {each.status} {each.output[-1500:]}" for each in ended)
    return Verdict(good, found)


def _burst(ports: list[int]) -> None:
    """Open more connections at once than a rank queues."""
    wires: list[socket.socket] = []
    for port in ports:
        with suppress(OSError):
            wires += [socket.create_connection(("127.0.0.1", port), timeout=1) for _ in range(_BURST)]
    for wire in wires:
        wire.close()


ROWS: dict[int, Row] = {27: stray_clients}
