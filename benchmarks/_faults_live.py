"""Rows about ranks that die, stop, are slow, or raise: the delay until every living rank knows, and its error."""

from __future__ import annotations

import ctypes
import json
import math
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks._fault_runs import Ended, Ranks, Verdict, run_ranks
from benchmarks._faults_phases import phase
from benchmarks.faults import MOST_SECONDS, Row
from meshwright.comm import init_process, stragglers

_HERE = "benchmarks._faults_live"
_STOP_LIMIT = 3.0
_KNOWN_BY = {"MESHWRIGHT_LIMIT": f"{_STOP_LIMIT:g}"}


def hold_lock(seconds: float) -> None:
    """Hold Python's global interpreter lock in one call that does not release it."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def steps_of_pairs(folder: str) -> None:
    """Compute; rank 1 reports that it is ready and waits for its end; then all other ranks communicate with it."""
    here, ready = init_process(backend="gloo"), Path(folder) / "ready"
    if here.rank == 1:
        ready.touch()
        time.sleep(60)
    while not ready.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    here.all_reduce(torch.ones(4), "sum", (0, 1) if here.rank == 0 else (1, 2))


def endless_steps(folder: str, size: str = "4") -> None:
    """All-reduce until an error; every rank reports once that it has begun."""
    here = init_process(backend="gloo")
    group, x = tuple(range(here.size)), torch.ones(int(size))
    for step in range(1_000_000):
        here.all_reduce(x, "sum", group)
        if step == 3:
            (Path(folder) / f"ready.{here.rank}").touch()
        time.sleep(0.001)


def one_rank_holds_the_lock(folder: str, seconds: str) -> None:
    """Run steps in the middle of which rank 1 does not respond for a long time, although its process runs."""
    here = init_process(backend="gloo")
    group = tuple(range(here.size))
    for step in range(6):
        if step == 3 and here.rank == 1:
            hold_lock(float(seconds))
        here.all_reduce(torch.ones(4), "sum", group)
        here.all_reduce(torch.ones(4), "sum", (0, 1)) if here.rank < 2 else None
    print("done", flush=True)


def slow_steps(folder: str, turns: str) -> None:
    """Run steps in which rank 1, or ranks 0 and 1 in turn, take 200 ms more; print the ranks' reports of each other."""
    here = init_process(backend="gloo")
    group = tuple(range(here.size))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(45):
            slow = step % 2 if turns == "turns" else 1
            if here.rank == slow:
                time.sleep(0.2)
            time.sleep(0.02)
            here.all_reduce(torch.ones(4), "sum", group)
        found = [each.rank for each in stragglers()]
        here.barrier(group)
    told = [str(each.message) for each in heard]
    (Path(folder) / f"told.{here.rank}").write_text(json.dumps({"warnings": told, "stragglers": found}))


def raises_on_one(folder: str) -> None:
    """Run steps of which one raises an error on rank 1."""
    here = init_process(backend="gloo")
    for step in range(20):
        if step == 5 and here.rank == 1:
            raise KeyError("the user's own mistake")
        here.all_reduce(torch.ones(4), "sum", tuple(range(here.size)))


def killed_in_forward() -> Verdict:
    """SIGKILL of a rank mid-forward is known on every living rank within 5 s, also without earlier communication."""
    words = ("DeadPeerError", "rank 1 is dead", "all_reduce(sum, float32, (4,))")
    verdicts = [phase(where, signal.SIGKILL) for where in ("in the memory", "while the backend opens")]
    for function, files in (("steps_of_pairs", ["ready"]), ("endless_steps", ["ready.0", "ready.1", "ready.2"])):
        ended, records = _ends_after_signal(function, files, signal.SIGKILL)
        verdicts.append(_verdict_on(ended, records, words, MOST_SECONDS))
    return _all(verdicts)


def stopped() -> Verdict:
    """SIGSTOP of a rank is known within the limit + 1 s; the error names the rank, the call and a record.

    A rank that holds the lock ends nothing.
    """
    ended, records = _ends_after_signal("endless_steps", ["ready.0", "ready.1", "ready.2"], signal.SIGSTOP)
    words = ("NoAnswerError", "no answer from rank 1 for", "stopped", "all_reduce(sum, float32", "rank-")
    told = _verdict_on(ended, records, words, _STOP_LIMIT + 1.0)
    held = run_ranks(f"{_HERE}:one_rank_holds_the_lock", 3, arguments=["12"], each=lambda rank: _KNOWN_BY, limit=90)
    lives = all(each.status == 0 and each.output == "done\n" for each in held)
    found = f"{told.found}; holding the lock for 12 s {'passes' if lives else held}"
    return Verdict(told.passed and lives, found, told.seconds)


def slow_rank() -> Verdict:
    """A rank that takes 200 ms more per step is named by a report, without failure; ranks that take turns are not."""
    said: dict[str, dict[str, Any]] = {}

    def look(run: Ranks) -> None:
        said.update({path.name: json.loads(path.read_text()) for path in run.folder.glob("told.*")})

    slow = run_ranks(f"{_HERE}:slow_steps", 3, arguments=["slow"], also=look, limit=90)
    named = all(said.get(f"told.{rank}", {}).get("stragglers") == [1] for rank in (0, 2))
    warned = [len(found["warnings"]) for _, found in sorted(said.items())]
    first = next(iter(said.get("told.0", {}).get("warnings", [])), "")
    table = dict(said)
    turns = run_ranks(f"{_HERE}:slow_steps", 3, arguments=["turns"], also=look, limit=90)
    quiet = all(not found["warnings"] for found in said.values())
    good = all(each.status == 0 for each in slow + turns)
    return Verdict(
        good and named and quiet and warned == [1, 0, 1] and "rank 1" in first, f"{first}; {table}; turns: {said}"
    )


def raised_on_one_rank() -> Verdict:
    """An exception in user code on one rank ends all ranks within 5 s, and each names the rank that began."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(f"{_HERE}:raises_on_one", 3, each=lambda rank: {"MESHWRIGHT_RECORDS": folder}, limit=60)
        written = _records_in(folder)
    before, own, _ = ended[1].output.partition('KeyError: "the user\'s own mistake"')
    records = {name: (seconds - written["rank-1.json"][0], calls) for name, (seconds, calls) in written.items()}
    words = ("MissingCallError", "rank 1 ended with KeyError", "_faults_live.py")
    told = _verdict_on(ended, records, words, MOST_SECONDS)
    return Verdict(told.passed and bool(own) and "found:" not in before, told.found, told.seconds)


def _ends_after_signal(function: str, files: list[str], number: signal.Signals) -> tuple[list[Ended], Records]:
    """Return the end of three ranks and their records; rank 1 gets a signal as soon as the files exist."""
    at: list[float] = []

    def fault(run: Ranks) -> None:
        for name in files:
            run.wait_for(name)
        at.append(time.time())
        run.send(1, number)

    with tempfile.TemporaryDirectory() as folder:
        env = {**_KNOWN_BY, "MESHWRIGHT_RECORDS": folder}
        ended = run_ranks(f"{_HERE}:{function}", 3, fault, each=lambda rank: env)
        records = _records_in(folder)
    return ended, {name: (written - at[0], calls) for name, (written, calls) in records.items()}


Records = dict[str, tuple[float, int]]
"""By file: time of writing, and number of calls."""


def _records_in(folder: str) -> Records:
    """Return the records in a folder; a rank writes its record when it knows of the fault."""
    found = {path.name: json.loads(path.read_text()) for path in Path(folder).rglob("rank-*.json")}
    return {name: (each["written"], len(each["calls"])) for name, each in found.items()}


def _verdict_on(ended: list[Ended], records: Records, words: tuple[str, ...], most: float) -> Verdict:
    """Return whether each living rank knew in time and failed, and the words that are missing on all of them."""
    living = [each for each in ended if each.rank != 1]
    times = [records.get(f"rank-{each.rank}.json", (math.inf, 0)) for each in living]
    seconds = round(max(time for time, _ in times), 2)
    missing = [word for word in words if not any(word in each.output for each in living)]
    unnamed = [each.rank for each in living if "rank 1" not in each.output]
    good = seconds <= most and all(each.status == 1 for each in living) and all(calls for _, calls in times)
    found = f"{seconds} s, statuses {[each.status for each in living]}, {[calls for _, calls in times]} calls recorded"
    if not good or missing or unnamed:
        outputs = "\n".join(f"[{each.rank}] {each.output[-1500:]}" for each in living)
        return Verdict(False, f"{found}; without {missing}; unnamed on {unnamed}\n{outputs}", seconds)
    return Verdict(True, found, seconds)


def _all(verdicts: list[Verdict]) -> Verdict:
    times = [each.seconds for each in verdicts if each.seconds is not None]
    return Verdict(all(each.passed for each in verdicts), "; ".join(each.found for each in verdicts), max(times))


ROWS: dict[int, Row] = {1: killed_in_forward, 3: stopped, 20: slow_rank, 30: raised_on_one_rank}
