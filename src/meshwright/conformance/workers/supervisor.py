"""Run checks in workers, and replace each worker that hangs or dies: a crash costs one check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.layout import CPU

from ..results.check import Check
from ..results.result import DIED, FAULTS, HUNG, NOT_RUN, OK, RAISED, Facts, Report, Result
from .messages import TABLE, RecordReader, Request, trace_path
from .traces import place_in, shortened
from .worker import MODULE, START_LIMIT

_BETWEEN_LOOKS = 0.02
_SPARE = 30.0
"""Seconds after the limit of a check at which the command ends a worker that has not ended itself."""
_OF_A_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
START = "start of a worker"
ALWAYS = 2
"""Processes that share the processors of any machine."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """The device (None: the accelerator, or else the CPU), the modules that workers import, the table of checks.

    `through_host`: processes may share devices, and communicate through the memory of the host. `processes` is the most
    processes of a check; by default four processes share the processors if there are as many.
    """

    device: str | None = None
    imports: tuple[str, ...] = ()
    table: str = TABLE
    through_host: bool = False
    processes: int | None = None


def run_checks(checks: Sequence[Check], options: Options, on_result: Callable[[Result], None]) -> Report:
    """Run the checks; call `on_result` for each result as soon as it is known."""
    run = _Run(options, on_result)
    run.batch([check for check in checks if check.processes == 1], 1)
    for processes in sorted({check.processes for check in checks} - {1}):
        several = [check for check in checks if check.processes == processes]
        reason = run.why_not(processes)
        if reason:
            run.skip(several, reason)
        else:
            run.batch(several, processes)
    return Report(run.facts, tuple(run.results), datetime.now(UTC).date().isoformat())


@dataclass
class _Run:
    options: Options
    on_result: Callable[[Result], None]
    facts: Facts | None = None
    results: list[Result] = field(default_factory=list[Result])

    def why_not(self, processes: int) -> str:
        """Return why checks on several processes cannot run; "" if they can."""
        if self.facts is None:
            return "no worker started"
        most, cores = self.options.processes, os.cpu_count() or 1
        if most is not None and processes > most:
            return f"needs {processes} processes"
        is_shared = self.facts.device == CPU or self.options.through_host
        if not is_shared and self.facts.count < processes:
            return f"needs {processes} devices, found {self.facts.count}"
        if is_shared and most is None and processes > max(cores, ALWAYS):
            return f"needs {processes} cores, found {cores}"
        return ""

    def add(self, result: Result) -> None:
        self.results.append(result)
        self.on_result(result)

    def skip(self, checks: Iterable[Check], reason: str) -> None:
        for check in checks:
            self.add(Result(check.level, check.name, NOT_RUN, reason))

    def batch(self, checks: Sequence[Check], processes: int) -> None:
        """Run checks in one worker after the other; the first worker also reports the facts of the machine."""
        left, begins = list(checks), True
        while left or begins:
            begins = False
            with TemporaryDirectory(prefix="meshwright-") as folder:
                worker = _Worker(Path(folder), self.options, left, processes)
                for result in worker.results():
                    self.add(result)
                    left.pop(0)
                self.facts = self.facts or worker.facts
                if worker.failure:
                    level = left[0].level if left else 0
                    self.add(Result(level, START, worker.failure[0], worker.failure[1]))
                    self.skip(left, "no worker started")
                    return


class _Worker:
    """One process, or one process for each rank, that runs checks until all are done or one of them ends it."""

    def __init__(self, folder: Path, options: Options, checks: Sequence[Check], processes: int) -> None:
        self._folder, self._checks, self._processes = folder, list(checks), processes
        keys = tuple(check.key for check in checks)
        Request(
            options.device, options.imports, options.table, processes, keys, str(folder), options.through_host
        ).write()
        self.facts: Facts | None = None
        self.failure: tuple[str, str] | None = None
        """State and detail, if the worker did not start."""
        self._readers = [RecordReader(folder, rank) for rank in range(processes)]
        self._found: dict[str, dict[int, Line]] = {}
        self._begun: set[str] = set()
        self._failed_start = ""

    def results(self) -> Iterator[Result]:
        """Yield the results in the order of the checks; the last one is that of the check that ended the worker."""
        with (self._folder / "output").open("w") as output:
            process = _start_process(self._folder, output.fileno())
            try:
                yield from self._follow(process)
            finally:
                _end_process(process)

    def _follow(self, process: subprocess.Popen[bytes]) -> Iterator[Result]:
        at, last, ended, killed = 0, time.monotonic(), False, False
        while not ended:
            ended = process.poll() is not None
            self._read()
            while at < len(self._checks) and len(self._found.get(self._checks[at].key, {})) == self._processes:
                yield self._combined(self._checks[at])
                at, last = at + 1, time.monotonic()
            limit = self._checks[at].limit if self._begun and at < len(self._checks) else START_LIMIT
            if not ended and time.monotonic() - last > limit + _SPARE:
                _end_process(process)
                killed = True
            time.sleep(0 if ended else _BETWEEN_LOOKS)
        if self.facts is None:
            self.failure = self._failure_at_start(process.returncode, killed)
        elif at < len(self._checks) and (self._begun - self._done() or process.returncode):
            yield self._result_at_end(self._checks[at], process.returncode, killed)

    def _done(self) -> set[str]:
        return {key for key, ranks in self._found.items() if len(ranks) == self._processes}

    def _read(self) -> None:
        for rank, reader in enumerate(self._readers):
            for line in reader.lines():
                if "facts" in line:
                    facts: dict[str, Any] = line["facts"]
                    facts["dtypes"] = tuple(facts["dtypes"])
                    self.facts = Facts(**facts)
                elif "begun" in line:
                    self._begun.add(line["begun"])
                elif "failed" in line:
                    self._failed_start = self._failed_start or str(line["failed"])
                else:
                    self._found.setdefault(line["key"], {})[rank] = line

    def _combined(self, check: Check) -> Result:
        """Return the result of all ranks: the first failure, or else the result of rank 0."""
        ranks = self._found[check.key]
        failed = [(line["at"], rank) for rank, line in ranks.items() if line["state"] in FAULTS]
        rank = min(failed)[1] if failed else min(ranks)
        line = ranks[rank]
        who = f"rank {rank}: " if failed and self._processes > 1 else ""
        return Result(check.level, check.name, line["state"], f"{who}{line['detail']}", round(line["seconds"], 4))

    def _result_at_end(self, check: Check, code: int, killed: bool) -> Result:
        """Return the result of the check that ended the worker."""
        if any(line["state"] in FAULTS for line in self._found.get(check.key, {}).values()):
            return self._combined(check)
        state, detail = self._ending(code, killed, check.limit)
        return Result(check.level, check.name, state, detail)

    def _failure_at_start(self, code: int, killed: bool) -> tuple[str, str]:
        if self._failed_start:
            return RAISED, self._failed_start
        state, detail = self._ending(code, killed, START_LIMIT)
        said = (self._folder / "output").read_text(errors="replace").strip().splitlines()
        return state, shortened(f"{detail}; {said[-1]}" if said else detail)

    def _ending(self, code: int, killed: bool, limit: float) -> tuple[str, str]:
        """Return the state and the detail of a worker that ended by itself, or that was ended."""
        paths = [trace_path(self._folder, rank) for rank in range(self._processes)]
        traces = [path.read_text(errors="replace") for path in paths if path.exists()]
        place = next(filter(None, map(place_in, traces)), "")
        if killed or any("Timeout (" in trace for trace in traces):
            return HUNG, f"after {limit:g} s{f' ({place})' if place else ''}"
        return DIED, f"{_ending_text(code)}{f' ({place})' if place else ''}"


def _ending_text(code: int) -> str:
    """Return the name of the signal, or the exit code.

    >>> _ending_text(-11), _ending_text(139), _ending_text(3)
    ('SIGSEGV', 'SIGSEGV', 'exit code 3')
    """
    number = -code if code < 0 else code - 128
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"exit code {code}"


def _start_process(folder: Path, output: int) -> subprocess.Popen[bytes]:
    """Start a worker in a session of its own; what it prints goes to a file."""
    own = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    env = {"OMP_NUM_THREADS": "1", **own, "MESHWRIGHT_PROGRAMS": "off", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, str(folder)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """End a worker and its children, if it has not ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def counted(results: Iterable[Result]) -> str:
    """Return the numbers of results by state, as text.

    >>> counted([Result(0, "a", "ok"), Result(0, "b", "ok"), Result(1, "c", "WRONG")])
    '3 checks: 2 ok, 1 WRONG'
    """
    states = [each.state for each in results]
    order = [OK, *FAULTS, NOT_RUN]
    told = ", ".join(f"{states.count(state)} {state}" for state in order if state in states)
    return f"{len(states)} checks: {told or 'none'}"
