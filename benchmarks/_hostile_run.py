"""Hostile cases in forked children: a case passes if it gives a result or one of our errors; others are counted."""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._hostile_inputs import OUTSIDE
from benchmarks._hostile_readers import Reader

LIMIT_S, MOST_MB, ROOM_MB = 10.0, 256.0, 1500
"""Seconds and peak megabytes of a case; megabytes of address space that a child gets beyond its initial size."""
BATCH = 25
STARTS = frozenset({
    "pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect",
    "ctypes.dlopen",
})  # fmt: skip
CHANGES = frozenset({"os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"})
"""Events of Python's audit hooks for new processes, and for changes of files."""
GUARD = b"nothing writes here\n"


@dataclass(frozen=True, slots=True)
class Bad:
    """A failed case: its name, the kind of failure (crash, hang, outside or memory), and the observation."""

    reader: str
    number: int
    change: str
    how: str
    seen: str


def run_reader(reader: Reader, seed: int, numbers: Sequence[int]) -> Iterator[Bad]:
    """Yield the failed cases of the reader."""
    left = list(numbers)
    while left:
        batch, left = left[:BATCH], left[BATCH:]
        done, bad = _batch(reader, seed, batch)
        yield from bad
        left = [*batch[done:], *left]


def _batch(reader: Reader, seed: int, batch: Sequence[int]) -> tuple[int, list[Bad]]:
    """Return how many cases of the batch ran in a child, and the failed ones."""
    sys.stdout.flush()
    sys.stderr.flush()
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        try:
            _child(reader, seed, batch, tell)
        except BaseException as error:
            os.write(tell, f"crash the benchmark: {error!r:.300}\n".encode("utf-8", "replace"))
        os._exit(0)
    os.close(tell)
    try:
        return _read_results(reader, batch, hear, child)
    finally:
        os.close(hear)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _read_results(reader: Reader, batch: Sequence[int], hear: int, child: int) -> tuple[int, list[Bad]]:
    bad, buffer, change = list[Bad](), b"", "?"
    at, end = 0, time.monotonic() + LIMIT_S + 5
    while at < len(batch):
        ready, _, _ = select.select([hear], [], [], max(0.0, end - time.monotonic()))
        data = os.read(hear, 2**16) if ready else b""
        if not data:
            how = "crash" if ready else "hang"
            return at + 1, [*bad, Bad(reader.name, batch[at], change, how, "the process ended" if ready else "")]
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            kind, _, text = line.decode("utf-8", "replace").partition(" ")
            if kind == "begin":
                change, end = text, time.monotonic() + LIMIT_S
                continue
            if kind != "fine":
                bad.append(Bad(reader.name, batch[at], change, kind, text))
            at, end = at + 1, time.monotonic() + LIMIT_S + 5
    return at, bad


def _child(reader: Reader, seed: int, batch: Sequence[int], tell: int) -> None:
    """Run the cases, and report the beginning and the end of each."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    sys.setrecursionlimit(1000)
    with tempfile.TemporaryDirectory() as root:
        touched = _watch(Path(root))
        resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") * 1024 + ROOM_MB * 2**20,) * 2)
        for number in batch:
            place = Path(root) / f"case-{number}"
            place.mkdir()
            (Path(root) / OUTSIDE).write_bytes(GUARD)
            draw = random.Random(f"{seed} {reader.name} {number}")
            change, act = reader.case(draw, place)
            os.write(tell, f"begin {change}\n".encode())
            touched.clear()
            how, seen = _outcome(act)
            if touched or (Path(root) / OUTSIDE).read_bytes() != GUARD:
                how, seen = "outside", " ".join(touched)[:200] or "the file outside was written"
            os.write(tell, f"{how} {seen[:400]}".replace("\n", " | ").encode("utf-8", "replace") + b"\n")


def _outcome(act: Any) -> tuple[str, str]:
    """Return `fine`, or the kind of failure and the observation."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory
    before = _status("VmRSS")
    how, seen = "fine", ""
    try:
        act()
    except BaseException as error:
        if not is_ours(error):
            how, seen = "crash", f"{type(error).__name__}: {error!s:.150} {_place(error)}"
    peak = (_status("VmHWM") - before) / 1024
    return ("memory", f"{peak:.0f} MB {seen}") if peak > MOST_MB else (how, seen)


def is_ours(error: BaseException) -> bool:
    """True for an error with four parts, or an error of the command line with a remedy."""
    from meshwright.cli.console.parser import UsageError
    from meshwright.layout import MeshwrightError

    if isinstance(error, MeshwrightError):
        return all(str(part).strip() for part in (error.asked, error.found, error.why, error.write))
    return isinstance(error, UsageError) and "fix:" in str(error)


def _place(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "meshwright" in f.filename]
    return f"at {frames[-1].filename.rpartition('meshwright/')[2]}:{frames[-1].lineno}" if frames else ""


def _status(name: str) -> int:
    """Return a number of kilobytes from the status of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))


def _watch(root: Path) -> list[str]:
    """Return a list that takes the names of everything written, started or unpickled outside `root`."""
    touched = list[str]()
    inside, quiet = os.path.realpath(root), (f"/proc/{os.getpid()}/clear_refs", "/dev/null")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, bytes)):
            writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            path = os.path.realpath(os.fsdecode(args[0])) if writes else inside
            if not path.startswith(inside) and path not in quiet and "/__pycache__/" not in path:
                touched.append(path)
        elif event in STARTS:
            touched.append(f"{event} {args!r:.100}")
        elif event in CHANGES:
            path = os.path.realpath(os.fsdecode(args[0])) if not isinstance(args[0], int) else inside
            if not path.startswith(inside):
                touched.append(f"{event} {path}")

    sys.addaudithook(hook)
    return touched
