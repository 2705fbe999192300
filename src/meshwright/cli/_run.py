"""`meshwright run`: a script on several ranks of this machine, simulated or as processes."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType

from meshwright.cli._parser import UsageError

FAILED = 1


def run(settings: argparse.Namespace, argv: list[str]) -> int:
    """The exit code of the script: of the process that failed first, or of the first rank that did not end with 0."""
    script = Path(settings.script)
    if not script.is_file():
        raise UsageError(f"meshwright run: there is no file {script}\n  write: meshwright run SCRIPT [ARGUMENT ...]")
    check_folder(settings.trace)
    with planned() if settings.auto else nullcontext(), printing(settings.all_ranks):
        if settings.processes:
            return run_processes(settings, argv, script)
        return run_simulated(settings, script)


@contextmanager
def planned() -> Generator[None]:
    """Inside, the modules of scripts are planned when they are called."""
    from meshwright.engine import unmarked

    with unmarked():
        yield


@contextmanager
def printing(all_ranks: bool) -> Generator[None]:
    """Inside, rank 0 prints; or all ranks do, and each line tells whose it is."""
    from meshwright.comm import first_rank_prints, prefix_prints

    with prefix_prints() if all_ranks else first_rank_prints():
        yield


def check_folder(path: str | None) -> None:
    """Raises UsageError, before anything runs, for a file to write in a folder that is not there."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise UsageError(f"meshwright: {path}: No such folder\n  write: a file in a folder that is there")


@contextmanager
def traced(path: str | None) -> Generator[None]:
    """Inside, this rank's work and communication are noted; behind, those of all ranks are written into the file.

    So they are where a script leaves by `sys.exit`; they are not where it fails.
    """
    from meshwright.engine import trace_comm

    if path is None:
        yield
        return
    left: SystemExit | None = None
    with trace_comm() as trace:
        try:
            yield
        except SystemExit as end:
            left = end
    trace.save(path)
    if left is not None:
        raise left


def is_one_rank() -> bool:
    """Whether this process is a rank that torchrun or `launch` has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_processes(settings: argparse.Namespace, argv: list[str], script: Path) -> int:
    """Start this very command once per rank; inside a rank, connect it and run the script."""
    from meshwright.comm import init_process, launch

    if not is_one_rank():
        return launch(["-m", "meshwright", *argv], settings.ranks, all_print=settings.all_ranks)
    init_process()
    with script_arguments(script, settings.arguments), traced(settings.trace):
        runpy.run_path(str(script), run_name="__main__")
    return 0


def run_simulated(settings: argparse.Namespace, script: Path) -> int:
    """Execute the whole script once per simulated rank, each in a namespace of its own."""
    from meshwright.cli._once import defined_once
    from meshwright.comm import current, simulate

    def one() -> int:
        with traced(settings.trace):
            return execute(code)

    with script_arguments(script, settings.arguments), defined_once(lambda: current().rank):
        try:
            code = compile(script.read_bytes(), str(script), "exec")
            return next(filter(None, simulate(one, settings.ranks)), 0)
        except Exception:
            traceback.print_exc()
            return FAILED


def execute(code: CodeType) -> int:
    """The exit code of one run of the script as `__main__`; leaving it by `sys.exit` ends this rank only."""
    try:
        exec(code, {"__name__": "__main__", "__file__": code.co_filename, "__builtins__": __builtins__})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else 0 if end.code is None else FAILED
    return 0


@contextmanager
def script_arguments(script: Path, arguments: list[str]) -> Generator[None]:
    """`sys.argv` and `sys.path` as Python itself would set them for the script."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
