"""A function of a user's Python file, named on the command line as `file.py:function`."""

from __future__ import annotations

import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from meshwright.cli.console.parser import UsageError


class FunctionFailed(Exception):
    """A user's file or function raised an error; the text names it and its line."""


def names_function(text: str) -> bool:
    """True if a text has the form `file.py:function`.

    >>> names_function("models/mine.py:build"), names_function("config.json")
    (True, False)
    """
    path, colon, name = text.rpartition(":")
    return bool(colon) and path.endswith(".py") and name.isidentifier()


def call_function(text: str) -> Any:
    """Return the result of the function, called without arguments; its file's folder is importable, as for a script.

    Raises:
        UsageError: there is no such file or function.
        FunctionFailed: the file or the function raised an error.
    """
    path, _, name = text.rpartition(":")
    if not Path(path).is_file():
        raise UsageError(f"meshwright: {path}: there is no such file\n  fix: pass file.py:function")
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        module = _module(Path(path))
        if not callable(getattr(module, name, None)):
            known = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
            near = get_close_matches(name, known, n=1, cutoff=0.0) or ["function"]
            raise UsageError(f"meshwright: {path} has no function {name}\n  fix: pass {path}:{near[0]}")
        return getattr(module, name)()
    except (UsageError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        raise FunctionFailed(_failed(text, path, error)) from error
    finally:
        sys.path.pop(0)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _failed(text: str, path: str, error: BaseException) -> str:
    """Return the message of the error, with the innermost line of the user's file."""
    at, trace = "", error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == Path(path).name:
            at = f" at {path}:{trace.tb_lineno}"
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        at = f" at {path}:{error.lineno}"
    said = str(error).strip().splitlines() or [""]
    return f"meshwright: {text} raised {type(error).__name__}{at}: {said[0]}\n  fix: pass a function that returns"
