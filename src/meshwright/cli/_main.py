"""From a command line to an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from meshwright.cli._parser import UsageError, parse

OK, FAILED, NOT_UNDERSTOOD, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out `argv` (the process's own by default) and give the exit code that `--help` documents."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        settings = parse(given)
        if settings.command == "train":
            from meshwright.cli._train import train as carry_out
        elif settings.command == "run":
            from meshwright.cli._run import run as carry_out
        elif settings.command == "plan":
            from meshwright.cli._plan import plan as carry_out
        elif settings.command == "predict":
            from meshwright.cli._plan import foretell as carry_out
        elif settings.command == "explain":
            from meshwright.cli._explain import explain as carry_out
        elif settings.command == "checkpoint":
            from meshwright.cli._checkpoint import checkpoint as carry_out
        else:
            from meshwright.cli._schedule import schedule as carry_out
        return carry_out(settings, given)
    except UsageError as error:
        print(error, file=sys.stderr)
        return NOT_UNDERSTOOD
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK if end.code is None else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
