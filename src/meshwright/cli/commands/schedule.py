"""`meshwright schedule`: check and draw a pipeline schedule."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.cli.console.exit_codes import FAILED
from meshwright.cli.console.files import check_folder
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError
from meshwright.layout import InputError, MeshwrightError, read_text_file, write_whole
from meshwright.pipeline import (
    KNOWN_SCHEDULES,
    Schedule,
    Timeline,
    Times,
    channels,
    check_schedule,
    parse_schedule,
    perfetto_trace,
    schedule_by_name,
    simulate_schedule,
    timeline_svg,
    timeline_text,
    with_transfers,
)

MOST_ACTIONS = 1_000_000
"""Most actions of a schedule that is drawn here."""


def schedule(settings: argparse.Namespace, argv: list[str]) -> int:
    """Print the picture or the table, and write the files asked for. Returns 1 for a table that cannot run."""
    check_folder(settings.svg, settings.trace)
    if settings.name == "list":
        told = {k.name: (k.make.__doc__ or "").splitlines()[0] for k in KNOWN_SCHEDULES.values()}
        if settings.json:
            print_json({"schedules": told})
        else:
            print_text("\n".join(f"{name:24} {said}" for name, said in told.items()))
        return 0
    if (actions := settings.ranks * settings.microbatches * settings.chunks) > MOST_ACTIONS:
        few = f"--microbatches {max(1, MOST_ACTIONS // (settings.ranks * settings.chunks))}"
        raise UsageError(f"meshwright schedule: about {actions} actions, more than {MOST_ACTIONS}\n  fix: pass {few}")
    try:
        table = asked_schedule(settings)
        check_schedule(table, stale=True)
        timeline = simulate_schedule(table, Times(*settings.times[:3], transfer=settings.times[3]))
    except MeshwrightError as error:
        print_text(error, file=sys.stderr)
        return FAILED
    _write(settings.svg, timeline_svg, timeline)
    _write(settings.trace, perfetto_trace, timeline)
    if settings.json:
        print_json(schedule_data(timeline))
    else:
        print(str(table) if settings.table else timeline_text(timeline, settings.width, sys.stdout.isatty()))
    return 0


def asked_schedule(settings: argparse.Namespace) -> Schedule:
    """Return the schedule of a file, or a known schedule."""
    if Path(settings.name).exists():
        return parse_schedule(_read(settings.name))
    k = schedule_by_name(settings.name)
    if settings.chunks != 2 and not k.takes_chunks:
        raise UsageError(f"meshwright schedule: {k.name} takes no --chunks\n  fix: run meshwright schedule {k.name!r}")
    return k.build(settings.ranks, settings.microbatches, settings.chunks)


def _read(path: str) -> str:
    try:
        return read_text_file(path)
    except InputError as error:
        raise _no_file(path, error.found, "pass a text file with a schedule") from error


def _write(path: str | None, drawn: Callable[[Timeline], str], timeline: Timeline) -> None:
    """Write the drawing of a timeline to a file, if one is asked for."""
    if not path:
        return
    try:
        write_whole(path, drawn(timeline).encode())
    except OSError as error:
        raise _no_file(path, error.strerror, "write to a file in a folder that is writable") from error


def _no_file(path: str, why: str | None, fix: str) -> UsageError:
    return UsageError(f"meshwright schedule: {path}: {why}\n  fix: {fix}")


def schedule_data(timeline: Timeline) -> dict[str, Any]:
    """Return the description of a schedule, for programs."""
    table = timeline.schedule
    return {
        "name": table.name,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "peaks": timeline.peaks(),
        "channels": {str(c): runs for c, runs in channels(with_transfers(table)).items()},
        "rows": [[str(action) for action in row] for row in table.rows],
    }
