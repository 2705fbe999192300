"""Launcher of local ranks as processes: started together, watched, and ended together.

No rank outlives the launcher. If the launcher is killed, the process that runs `reaper.py` ends the ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from .._errors import LaunchError
from ..torch_hooks import TCPStore
from . import reaper as _reaper
from .rank_console import KEPT_LINES, print_lines
from .rendezvous import host_store
from .run_secret import VARIABLE, new_token

_GRACE_AFTER_FAILURE = 3.0
_GRACE_AFTER_TERMINATE = 3.0
_GRACE_TO_SAVE = 30.0
_BETWEEN_LOOKS = 0.05
_TIMED_OUT = 124
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TO_END = (signal.SIGTERM, signal.SIGHUP)
"""Signals on which ranks finish their step and save."""


@dataclass
class _Rank:
    """One process and its last printed lines; rank 0 prints directly."""

    rank: int
    process: subprocess.Popen[str]
    own_session: bool
    lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=KEPT_LINES))
    follower: threading.Thread | None = None
    was_told: bool = False
    """True once the process has got a signal to end. A second signal might interrupt a rank that saves."""


def launch(
    argv: Sequence[str],
    ranks: int,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    all_print: bool = False,
) -> int:
    """Run `python argv…` as `ranks` local processes; return 0, or the exit status of the rank that failed first.

    The processes get torchrun's environment variables, and a store on loopback that this process serves. Rank 0 prints
    directly, and with `all_print` all ranks do. Otherwise the last lines of the other ranks are printed with a prefix
    when the run fails. When one rank fails, the others have a few seconds to report, and are then ended. All ranks are
    ended on SIGINT, SIGTERM, SIGHUP or after `timeout` seconds (status 124). On SIGTERM they have half a minute to
    finish and save; another SIGTERM changes nothing, and a second SIGINT ends them at once.

    Raises:
        LaunchError: there is no script, or `ranks` is less than 1.
    """
    if ranks < 1 or not argv:
        raise LaunchError(
            f"{ranks} ranks of {list(argv)}",
            "nothing to start",
            "a run needs a script and at least one rank",
            "write `--ranks 2 script.py`",
        )
    store = host_store("127.0.0.1", 0, ranks, timedelta(minutes=30))
    run = uuid4().hex[:12]
    base = {**os.environ, **(env or {}), VARIABLE: new_token()}
    mark = f"{VARIABLE}={base[VARIABLE]}"
    started: list[_Rank] = []
    failed: int | None = None
    with _forwarded_signals(started) as signals, _reaping(mark) as reaper:
        try:
            for rank in range(ranks):
                started.append(_start(argv, rank, _environment(base, rank, ranks, store.port, run), all_print))
                _tell(reaper, f"{started[-1].process.pid}")
            failed = _watch(started, signals, timeout)
            _give_time(started, failed, signals)
        finally:
            _end(started, signals)
            _reaper.end_marked(mark)
    if signals:
        return 128 + signals[0]
    if failed is None:
        return _TIMED_OUT if any(rank.process.returncode for rank in started) else 0
    return _report(started, failed, _first_to_fail(store, run, started, failed))


def _environment(base: Mapping[str, str], rank: int, ranks: int, port: int, run: str) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **base,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _start(argv: Sequence[str], rank: int, env: dict[str, str], all_print: bool) -> _Rank:
    """Start a rank. Rank 0 keeps the terminal, so that a debugger works in it.

    Other ranks have pipes and their own session.
    """
    keeps_terminal = rank == 0 and sys.stdin is not None and sys.stdin.isatty()
    process = subprocess.Popen(
        [sys.executable, *argv],
        env=env,
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.PIPE,
        stderr=None if rank == 0 else subprocess.STDOUT,
        start_new_session=not keeps_terminal,
        text=True,
        errors="replace",
    )
    started = _Rank(rank, process, not keeps_terminal)
    if process.stdout is not None:
        told = (started, all_print)
        started.follower = threading.Thread(target=_follow, args=told, name=f"follow rank {rank}", daemon=True)
        started.follower.start()
    return started


def _follow(rank: _Rank, prints: bool) -> None:
    """Print the lines of a rank, or keep the last of them."""
    assert rank.process.stdout is not None
    with rank.process.stdout as lines:
        for line in lines:
            if prints:
                print(line, end="", flush=True)
            else:
                rank.lines.append(line.rstrip("\n"))


def _watch(ranks: list[_Rank], signals: list[int], timeout: float | None) -> int | None:
    """Return the first rank seen to fail; None if all ended well, a signal came, or the time ran out.

    It polls the process, not its output: a child of the process may keep the output open.
    """
    end = time.monotonic() + (timeout if timeout is not None else float("inf"))
    while not signals and time.monotonic() < end:
        codes = [rank.process.poll() for rank in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        time.sleep(_BETWEEN_LOOKS)
    return None


def _give_time(ranks: list[_Rank], failed: int | None, signals: list[int]) -> None:
    """Give the other ranks time to report after a failure."""
    end = time.monotonic() + _GRACE_AFTER_FAILURE
    while failed is not None and not signals and time.monotonic() < end and _some_live(ranks):
        time.sleep(_BETWEEN_LOOKS)


def _some_live(ranks: list[_Rank]) -> bool:
    return any(rank.process.poll() is None for rank in ranks)


def _end(ranks: list[_Rank], signals: list[int]) -> None:
    """End all ranks and all processes of their sessions."""
    for rank in ranks:
        if not rank.was_told:
            _send(rank, signal.SIGTERM)
    end = time.monotonic() + _grace(signals)
    while _some_live(ranks) and time.monotonic() < end:
        if signals.count(signal.SIGINT) > 1:
            break
        time.sleep(_BETWEEN_LOOKS)
    for rank in ranks:
        _send(rank, signal.SIGKILL)
        if rank.own_session:
            _reaper.send_group(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        if rank.follower is not None:
            rank.follower.join(timeout=1.0)


def _grace(signals: list[int]) -> float:
    """Return the seconds that ranks have to end by themselves."""
    return _GRACE_TO_SAVE if any(number in _TO_END for number in signals) else _GRACE_AFTER_TERMINATE


def _send(rank: _Rank, number: int) -> None:
    if rank.process.poll() is not None:
        return
    rank.was_told = rank.was_told or number in _TO_END
    with suppress(ProcessLookupError):
        if rank.own_session:
            os.killpg(rank.process.pid, number)
        else:
            rank.process.send_signal(number)


@contextmanager
def _reaping(mark: str) -> Generator[subprocess.Popen[str] | None]:
    """Run a process inside the block that ends the ranks if this process dies; yields None if it cannot start."""
    try:
        reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(_reaper.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
    except OSError:
        yield None
        return
    _tell(reaper, mark)
    try:
        yield reaper
    finally:
        _tell(reaper, _reaper.DONE)
        with suppress(OSError):
            reaper.communicate()


def _tell(reaper: subprocess.Popen[str] | None, line: str) -> None:
    if reaper is not None and reaper.stdin is not None:
        with suppress(OSError):
            reaper.stdin.write(f"{line}\n")
            reaper.stdin.flush()


@contextmanager
def _forwarded_signals(ranks: list[_Rank]) -> Generator[list[int]]:
    """Forward each signal to end once to every rank, and yield the list of signals received.

    A rank with the terminal gets SIGINT from the terminal.
    """
    seen: list[int] = []

    def forward(number: int, frame: object) -> None:
        seen.append(number)
        for rank in ranks:
            if not rank.was_told and (rank.own_session or number != signal.SIGINT):
                _send(rank, number)

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    ignored = [number for number in _FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in _FORWARDED if number not in ignored}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_to_fail(store: TCPStore, run: str, ranks: list[_Rank], seen: int) -> int:
    """Return the rank killed by a signal, otherwise the first one in the store, otherwise the one seen first."""
    if (ranks[seen].process.returncode or 0) < 0:
        return seen
    key = f"meshwright/{run}/0/failed/1"
    told = store.get(key).decode(errors="replace") if store.check([key]) else ""
    return int(told) if told.isdecimal() and int(told) < len(ranks) else seen


def _report(ranks: list[_Rank], seen: int, first: int) -> int:
    code = ranks[first].process.returncode or ranks[seen].process.returncode
    ending = f"was killed first, by {signal.Signals(-code).name}" if code < 0 else f"failed first, with status {code}"
    for rank in sorted(ranks[1:], key=lambda rank: rank.rank == first):
        print_lines(rank.rank, rank.lines)
    where = "above" if first == 0 else f"marked [{first}]"
    print(f"meshwright: rank {first} {ending}; its last lines are {where}", file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code
