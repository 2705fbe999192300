"""Run a script as Python itself does, once for each of several simulated ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from meshwright.cli.console.exit_codes import OK, code_of


class Main(ModuleType):
    """The module `__main__`, which shows each rank the names that the script has defined on that rank.

    So pickle, type hints, `inspect` and the processes of a loader find the script's classes, as on one device.
    """

    def __init__(self, code: CodeType, rank: Callable[[], int]) -> None:
        super().__init__("__main__")
        own: dict[str, Any] = super().__getattribute__("__dict__")
        own |= {"_code": code, "_rank": rank, "_names": {}}

    def __getattribute__(self, name: str) -> Any:
        names = _names(super().__getattribute__("__dict__"))
        if name == "__dict__":
            return names
        return names[name] if name in names else super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def execute(self) -> int:
        """Return the exit code of one run on this rank; `sys.exit` in the script ends this rank only."""
        try:
            exec(super().__getattribute__("_code"), self.__dict__)
        except SystemExit as end:
            return code_of(end)
        return OK


def _names(own: dict[str, Any]) -> dict[str, Any]:
    """Return the names of the running rank: those that Python itself sets, and those that the script has added."""
    fresh = {
        "__name__": "__main__",
        "__file__": own["_code"].co_filename,
        "__builtins__": __builtins__,
        "__doc__": None,
        "__spec__": None,
        "__loader__": None,
        "__package__": None,
    }
    return own["_names"].setdefault(own["_rank"](), fresh)


@contextmanager
def running_as_main(code: CodeType, rank: Callable[[], int]) -> Generator[Main]:
    """Make the script's module `__main__`, inside the block."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main = Main(code, rank)
    try:
        yield main
    finally:
        sys.modules["__main__"] = before


@contextmanager
def script_arguments(script: Path, arguments: list[str]) -> Generator[None]:
    """Set `sys.argv` and `sys.path` as Python itself does for the script."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def with_script_traceback(error: Exception, script: Path) -> Exception:
    """Return the error with a traceback that begins in the script; an error of ours outside it has none."""
    from meshwright.layout import MeshwrightError

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return error.with_traceback(trace) if trace or isinstance(error, MeshwrightError) else error
