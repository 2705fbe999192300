"""The exit codes, which `--help` documents."""

from __future__ import annotations

import sys

OK, FAILED, NOT_UNDERSTOOD, INTERRUPTED = 0, 1, 2, 130


def code_of(end: SystemExit) -> int:
    """Return the exit code of `sys.exit(…)`. A text is printed to standard error, with code 1, as in Python."""
    if end.code is None or isinstance(end.code, int):
        return end.code or OK
    print(end.code, file=sys.stderr)
    return FAILED
