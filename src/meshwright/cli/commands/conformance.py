"""`meshwright conformance`: check a device, and say what it may be used for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING

from meshwright.cli.console.exit_codes import FAILED, OK
from meshwright.cli.console.files import check_folder, write_text
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError

if TYPE_CHECKING:
    from meshwright.conformance import Check


def conformance(settings: argparse.Namespace, argv: list[str]) -> int:
    """Run the checks of the chosen levels; return 1 if one of them fails."""
    check_folder(settings.html)
    _check_imports(settings.imports)
    from meshwright.conformance import CHECKS, Options, Result, counted, keep_results, run_checks, uses_of

    chosen = _chosen(CHECKS, settings.only, settings.level)
    file = sys.stderr if settings.json else sys.stdout

    def show(result: Result) -> None:
        print_text(result, file=file)
        file.flush()

    options = Options(
        settings.device, tuple(settings.imports), through_host=settings.through_host, processes=settings.processes
    )
    report = run_checks(chosen, options, show)
    if not settings.only:
        keep_results(report)
    uses = uses_of(report.results)
    if settings.html:
        from meshwright.cli.console.conformance_page import page

        write_text(settings.html, page(report, uses))
    if settings.json:
        print_json(report.data(uses))
    else:
        print_text(
            "\n".join(["", str(report.facts or "no worker started"), "", *map(str, uses), "", counted(report.results)])
        )
    return OK if report.ok else FAILED


def _chosen(checks: Sequence[Check], text: str, levels: Collection[int]) -> list[Check]:
    """Return the checks of these levels whose names contain the text. Raises UsageError if there is none."""
    named = [check for check in checks if text.lower() in check.name.lower()]
    chosen = [check for check in named if check.level in levels]
    if not chosen:
        fix = _fix_for_name(text, {check.level for check in named}, [check.name for check in checks])
        raise UsageError(f"meshwright conformance: no check of these levels has {text!r} in its name\n  fix: {fix}")
    return chosen


def _fix_for_name(text: str, levels: Collection[int], names: Sequence[str]) -> str:
    """Return how to choose checks by name: the level that has the name, or else the nearest name."""
    if levels:
        return f"add --level {min(levels)}, which has such checks"
    nearest = get_close_matches(text, names, 1, cutoff=0.0)[0]
    return f"write a part of a name that the command prints, such as --only {nearest!r}"


def _check_imports(names: Sequence[str]) -> None:
    """Raise UsageError for a module that a worker could not find; workers also look in the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in names:
        try:
            found = find_spec(name) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            fix = "install the module, or start the command in the folder that contains it"
            raise UsageError(f"meshwright conformance: there is no module {name}\n  fix: {fix}")
