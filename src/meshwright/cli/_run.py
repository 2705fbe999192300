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
    with planned() if settings.auto else nullcontext(), prefixed() if settings.prefix else nullcontext():
        if settings.processes:
            return run_processes(settings.ranks, argv, script, settings.arguments)
        return run_simulated(settings.ranks, script, settings.arguments)


@contextmanager
def planned() -> Generator[None]:
    """Inside, the modules of scripts are planned when they are called."""
    from meshwright.engine import unmarked

    with unmarked():
        yield


@contextmanager
def prefixed() -> Generator[None]:
    """Inside, what a rank prints tells whose it is."""
    from meshwright.comm import prefix_prints

    with prefix_prints():
        yield


def is_one_rank() -> bool:
    """Whether this process is a rank that torchrun or `launch` has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_processes(ranks: int, argv: list[str], script: Path, arguments: list[str]) -> int:
    """Start this very command once per rank; inside a rank, connect it and run the script."""
    from meshwright.comm import init_process, launch

    if not is_one_rank():
        return launch(["-m", "meshwright", *argv], ranks)
    init_process()
    with script_arguments(script, arguments):
        runpy.run_path(str(script), run_name="__main__")
    return 0


def run_simulated(ranks: int, script: Path, arguments: list[str]) -> int:
    """Execute the whole script once per simulated rank, each in a namespace of its own."""
    from meshwright.cli._once import defined_once
    from meshwright.comm import current, simulate

    with script_arguments(script, arguments), defined_once(lambda: current().rank):
        try:
            code = compile(script.read_bytes(), str(script), "exec")
            return next(filter(None, simulate(lambda: execute(code), ranks)), 0)
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
