"""Exit codes, which `--help` documents."""

from __future__ import annotations

import sys

OK, FAILED, NOT_UNDERSTOOD, INTERRUPTED = 0, 1, 2, 130


def code_of(end: SystemExit) -> int:
    """What `sys.exit(…)` asks for; a text is printed and fails, as in Python itself."""
    if end.code is None or isinstance(end.code, int):
        return end.code or OK
    print(end.code, file=sys.stderr)
    return FAILED
