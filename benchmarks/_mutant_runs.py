"""Test runs on one mutant: the tests of one package, in a copy of the source and in a forked process.

The parent process has imported torch and everything else that the tests need, except this package. A forked child
imports the mutated package from the copy and runs pytest up to the first failure. So a mutant takes the time of its
tests and about one second. The parent never imports `meshwright`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks._mutants import Mutant

COPIED = ("src", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "CONTRIBUTING.md")
OPTIONS = (
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=ci"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # the parent process has imported pytest's plugins
)
MEMORY = 12 * 2**30
OWN_MODULES = ("meshwright", "tests", "benchmarks", "conftest", "__")


@dataclass(frozen=True)
class Outcome:
    """The result of a package's tests: the first failed test or another reason, or None if all tests passed."""

    killer: str | None
    seconds: float
    durations: dict[str, float] = field(default_factory=dict[str, float])
    modules: tuple[str, ...] = ()


class Tree:
    """A copy of the working tree, in which one file at a time is mutated; removed by `close`."""

    def __init__(self, root: Path, at: Path) -> None:
        self.at = at
        command = ["git", "ls-files", "-co", "--exclude-standard", *COPIED]
        files = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        for name in files.splitlines():
            if (root / name).is_file():
                (at / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, at / name)

    def close(self) -> None:
        shutil.rmtree(self.at.parent)

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant | None):
        """Put the mutant into the tree for the duration of the context.

        The file and its time stamp are restored, so that compiled files stay valid.
        """
        if mutant is None:
            yield
            return
        path = self.at / mutant.file
        source, stamp = path.read_bytes(), path.stat()
        path.write_text(mutant.code)
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


class Runner:
    """A runner of a package's tests on mutants; `prepare` runs the tests on the unchanged source first."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.base: dict[str, Outcome] = {}
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tree.at / 'src'}:{tree.at}", "PYTHONHASHSEED": "0"}
        importlib.import_module("torch").set_num_threads(1)

    def prepare(self, package: str) -> None:
        """Run the tests on the unchanged source, import the modules that they imported, and collect the tests again.

        Raises RuntimeError if a test fails on the unchanged source, because mutants would then show nothing.
        """
        if package in self.base:
            return
        found = self.run(package, None, (), 3600.0)
        if found.killer is None:
            _import(found.modules)
            again = self.run(package, None, (), 600.0, "--collect-only")
            found = replace(found, killer=again.killer)
        if found.killer is not None:
            log = (self.tree.at.parent / "log.txt").read_text()[-4000:]
            raise RuntimeError(f"tests/{package} fails on the unchanged source: {found.killer}\n{log}")
        self.base[package] = found

    def run(
        self, package: str, mutant: Mutant | None, first: Sequence[str], limit: float | None = None, *options: str
    ) -> Outcome:
        """Run the tests of `package` up to the first failure: those in `first` first, then fast before slow ones."""
        base = self.base.get(package)
        limit = limit or 120.0 + 4 * (base.seconds if base else 0.0)
        report, begin = self.tree.at.parent / "report.jsonl", time.perf_counter()
        report.write_text("")
        with self.tree.mutated(mutant):
            child = os.fork()
            if child == 0:
                _in_child(
                    self.tree.at, [*options, f"tests/{package}"], _Plugin(report, first, base.durations if base else {})
                )
            code = _wait(child, limit)
        seconds = round(time.perf_counter() - begin, 2)
        found = [json.loads(line) for line in report.read_text().splitlines()]
        durations = {entry["test"]: entry["seconds"] for entry in found if "seconds" in entry}
        modules = next((entry["modules"] for entry in found if "modules" in entry), ())
        failed = next((entry["failed"] for entry in found if "failed" in entry), None)
        killer = None if code == 0 else failed or ("timeout" if code is None else f"pytest ended with {code}")
        return Outcome(killer, seconds, durations, tuple(modules))


def _import(names: Sequence[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            if name not in sys.modules and not name.startswith(OWN_MODULES):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)


def _in_child(tree: Path, options: Sequence[str], plugin: _Plugin) -> None:
    """Run pytest and end the process."""
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(tree)
        for name in [n for n in sys.modules if n.partition(".")[0] in ("benchmarks", "tests", "meshwright")]:
            del sys.modules[name]
        sys.path[:0] = [str(tree / "src"), str(tree)]
        log = os.open(tree.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = int(pytest.main([*OPTIONS, *options], plugins=[plugin]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _wait(child: int, limit: float) -> int | None:
    """Return the exit code of the child, or None if it ran past the limit; end its whole process group."""
    end, code = time.monotonic() + limit, None
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    return code


class _Plugin:
    """A pytest plugin that orders the tests and records their times, the first failure and the imported modules."""

    def __init__(self, report: Path, first: Sequence[str], durations: dict[str, float]) -> None:
        self.report, self.durations = report, durations
        self.first = {test: at for at, test in enumerate(first)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        last = len(self.first)
        items.sort(key=lambda item: (self.first.get(item.nodeid, last), self.durations.get(item.nodeid, 0.0)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write({"failed": report.nodeid})
        elif report.when == "call":
            self._write({"test": report.nodeid, "seconds": round(report.duration, 4)})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"failed": f"{report.nodeid} (collection)"})

    def pytest_sessionfinish(self) -> None:
        if not self.durations:
            self._write({"modules": sorted(sys.modules)})

    def _write(self, entry: dict[str, Any]) -> None:
        with self.report.open("a") as file:
            file.write(json.dumps(entry) + "\n")
