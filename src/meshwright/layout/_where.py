"""Where in the user's own files something happens, and in which module of the model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

_OURS = __name__.rsplit(".", 2)[0] + "."
_BELOW = ("torch.", _OURS, "contextlib.", "functools.", "threading.", "concurrent.")
"""Modules whose frames are no user's."""
_GENERATED = "<eval_with_key>"
"""So begin the names of files that torch.fx writes."""


def user_frame(frame: FrameType | None = None) -> str:
    """`file:line` of the nearest caller outside of torch and of this package; of the caller, or of another frame."""
    return next((_line(f, f.f_lineno) for f in _callers(frame or sys._getframe(1)) if _is_users(f)), "")


def user_line(trace: TracebackType | None) -> str:
    """`file:line` of the innermost of the user's own frames in a traceback."""
    lines = [_line(t.tb_frame, t.tb_lineno) for t in _traces(trace) if _is_users(t.tb_frame)]
    return lines[-1] if lines else ""


def module_path(frame: FrameType | None = None) -> str:
    """Path of the innermost module that the caller is inside of, from the outermost one; its class for that itself."""
    return _path(_callers(frame or sys._getframe(1)))


def user_place(trace: TracebackType | None) -> str:
    """`file:line in module` of the innermost of the user's own frames in a traceback; the module where there is one."""
    line, module = user_line(trace), _path(t.tb_frame for t in reversed(list(_traces(trace))))
    return f"{line} in {module}" if line and module else line


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _line(frame: FrameType, number: int) -> str:
    return f"{frame.f_code.co_filename}:{number}"


def _path(frames: Iterable[FrameType]) -> str:
    """From frames, the innermost first: those of modules' own methods hold the module as `self`."""
    modules: list[Any] = []
    for frame in frames:
        held = frame.f_locals.get("self") if frame.f_code.co_name in ("forward", "_call_impl") else None
        if hasattr(held, "named_modules"):
            modules.append(held)
    if not modules:
        return ""
    inner, outer = modules[0], modules[-1]
    path = next((name for name, module in outer.named_modules() if module is inner), "")
    return path or type(inner).__name__


def _is_users(frame: FrameType) -> bool:
    if frame.f_code.co_filename.startswith(_GENERATED):
        return False
    module = str(frame.f_globals.get("__name__", ""))
    if module.startswith(_OURS + "models"):
        return True
    return not f"{module}.".startswith(_BELOW)
