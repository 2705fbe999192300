"""Parse a command line, run the command, and return its exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from meshwright.cli.console.exit_codes import FAILED, INTERRUPTED, NOT_UNDERSTOOD, code_of
from meshwright.cli.console.parser import UsageError, parse
from meshwright.cli.console.user_function import FunctionFailed

COMMAND_FUNCTIONS = {
    "train": ("train", "train"), "run": ("run", "run"), "schedule": ("schedule", "schedule"),
    "plan": ("plan", "plan"), "predict": ("plan", "predict_step"), "explain": ("explain", "explain"),
    "checkpoint": ("checkpoint", "checkpoint"), "doctor": ("doctor", "doctor"),
    "parallelize": ("parallelize", "parallelize"), "profile": ("profile", "profile"),
    "conformance": ("conformance", "conformance"), "quantize": ("quantize", "quantize"),
}  # fmt: skip
"""Command → its module and function. It is imported only when the command runs, because most of them need torch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv` (default: the process's own) and return the exit code that `--help` documents."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        settings = parse(given)
        file, name = COMMAND_FUNCTIONS[settings.command]
        return getattr(import_module(f"meshwright.cli.commands.{file}"), name)(settings, given)
    except UsageError as error:
        print(error, file=sys.stderr)
        return NOT_UNDERSTOOD
    except FunctionFailed as error:
        print(error, file=sys.stderr)
        return FAILED
    except SystemExit as end:
        return code_of(end)
    except BrokenPipeError:  # the reader closed the pipe; the rest must not raise an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"meshwright: the output: {error.strerror}\n  fix: write it to a disk with free space", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
