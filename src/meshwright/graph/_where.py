"""Where in the user's own files something happens."""

from __future__ import annotations

import sys
from types import TracebackType

_OURS = __name__.rsplit(".", 2)[0] + "."


def user_frame() -> str:
    """`file:line` of the nearest caller outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_globals.get("__name__", "")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_line(trace: TracebackType | None) -> str:
    """`file:line` of the innermost of the user's own frames in a traceback."""
    found = ""
    while trace is not None:
        if _is_users(trace.tb_frame.f_globals.get("__name__", "")):
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _is_users(module: str) -> bool:
    if module.startswith(_OURS + "models"):
        return True
    return not module.startswith(("torch.", _OURS, "contextlib")) and module != "torch"
