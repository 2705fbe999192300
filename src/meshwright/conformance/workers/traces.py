"""File and line of errors, hangs and crashes."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+) in ', re.MULTILINE)
_PARTS = 3
_MOST = 600
"""Most characters of a text in a result: enough for an error of four parts that quotes one of torch."""


def short_path(path: str) -> str:
    """Return the last parts of a path, which name the file on any machine.

    >>> short_path("/home/me/site-packages/torch/nn/modules/linear.py")
    'nn/modules/linear.py'
    """
    return "/".join(Path(path).parts[-_PARTS:])


def shortened(text: str) -> str:
    """Return the text on one line, and not longer than a result shows."""
    joined = " ".join(text.split())
    return joined if len(joined) <= _MOST else f"{joined[: _MOST - 1]}…"


def error_text(error: BaseException) -> str:
    """Return class, message, file and line of an error: those of the last frame outside torch, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/torch/" not in frame.filename]
    place = (own or frames)[-1:]
    where = f" ({short_path(place[0].filename)}:{place[0].lineno})" if place else ""
    name = f"{type(error).__name__}: "
    return shortened(name + str(error).removeprefix(name)) + where  # errors of Meshwright begin with their class


def place_in(trace: str) -> str:
    """Return file and line of the last thread in the text that faulthandler writes; "" if there is none.

    The main thread is the last one. Frames of Python's library are skipped, unless there are no others.
    """
    _, _, last = trace.rpartition("(most recent call first)")
    frames = _FRAME.findall(last)
    return _place(frames)


def _place(frames: Sequence[tuple[str, str]]) -> str:
    library = sysconfig.get_paths()["stdlib"]
    own = [each for each in frames if not each[0].startswith(library) and "site-packages" not in each[0]]
    chosen = (own or list(frames))[:1]
    return f"{short_path(chosen[0][0])}:{chosen[0][1]}" if chosen else ""
