"""`meshwright run`: run a script on several ranks of this machine, simulated or as processes."""

from __future__ import annotations

import argparse
import os
import runpy
import traceback
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType

from meshwright.cli.console.exit_codes import FAILED, OK
from meshwright.cli.console.files import check_folder
from meshwright.cli.console.parser import UsageError
from meshwright.cli.console.user_function import FunctionFailed
from meshwright.cli.ranks.script import running_as_main, script_arguments, with_script_traceback


def run(settings: argparse.Namespace, argv: list[str]) -> int:
    """Return the exit code of the script: 0, or that of the rank that failed first."""
    script = Path(settings.script)
    if not script.is_file():
        raise UsageError(f"meshwright run: there is no file {script}\n  fix: run meshwright run SCRIPT [ARGUMENT ...]")
    check_folder(settings.trace)
    code = compiled(script)
    with modules_planned() if settings.auto else nullcontext():
        if settings.processes:
            return run_processes(settings, argv, script)
        return run_simulated(settings, script, code)


@contextmanager
def modules_planned() -> Generator[None]:
    """Plan the modules of scripts inside the block, when they are called."""
    from meshwright.engine import unmarked

    with unmarked():
        yield


@contextmanager
def traced(path: str | None) -> Generator[None]:
    """Record this rank's work and communication inside the block; afterwards write those of all ranks into the file.

    The file is also written if the script leaves by `sys.exit`, but not if it fails.
    """
    if path is None:
        yield
        return
    from meshwright.engine import trace_comm

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
    """True if this process is a rank that torchrun or `launch` has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_processes(settings: argparse.Namespace, argv: list[str], script: Path) -> int:
    """Start this same command once per rank; inside a rank, connect it and run the script."""
    from meshwright.comm import init_process, launch, prefix_prints

    if not is_one_rank():
        return launch(["-m", "meshwright", *argv], settings.ranks, all_print=settings.all_ranks)
    init_process()
    with prefix_prints() if settings.all_ranks else nullcontext():
        with script_arguments(script, settings.arguments), traced(settings.trace):
            runpy.run_path(str(script), run_name="__main__")
    return OK


def compiled(script: Path) -> CodeType:
    """Return the script's code. Raises FunctionFailed for a file that Python cannot compile."""
    try:
        return compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError) as error:
        told = "".join(traceback.format_exception_only(error)).rstrip()
        raise FunctionFailed(f"{told}\n  fix: pass a script that python {script} can read") from error
    except OSError as error:
        raise UsageError(f"meshwright run: {script}: {error.strerror}\n  fix: pass a file that can be read") from error


def is_print_error(error: Exception, printer: str) -> bool:
    """True if the error was raised while a rank's output was written, by the module `printer`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(error, OSError) and trace is not None and trace.tb_frame.f_globals.get("__name__") == printer


def run_simulated(settings: argparse.Namespace, script: Path, code: CodeType) -> int:
    """Run the whole script once per simulated rank, each in its own namespace."""
    from meshwright.cli.ranks.define_once import defined_once
    from meshwright.comm import CommError, KeptLines, first_rank_prints, installed_communicator, prefix_prints, simulate

    def rank() -> int:
        communicator = installed_communicator()
        return 0 if communicator is None else communicator.rank

    def one() -> int:
        code = FAILED
        try:
            with traced(settings.trace):
                code = main.execute()
        finally:
            if code != OK:
                failed.append(rank())
        return code

    failed: list[int] = []
    kept = KeptLines()
    prints = prefix_prints() if settings.all_ranks else first_rank_prints(kept)
    with script_arguments(script, settings.arguments), defined_once(rank), prints:
        try:
            with running_as_main(code, rank) as main:
                codes = simulate(one, settings.ranks)
        except Exception as error:
            if is_print_error(error, prefix_prints.__module__):
                raise
            kept.show([] if isinstance(error, CommError) else failed[:1])
            traceback.print_exception(with_script_traceback(error, script))
            return FAILED
    if not failed:
        return OK
    kept.show(failed[:1])
    return codes[failed[0]]
