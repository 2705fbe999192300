"""Pictures of a timeline: text for a terminal, SVG, and a trace for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from html import escape

from ..table.action import COMPUTES, NOTHING, Action, ActionKind
from ..table.schedule import Way, chunks_on
from .simulator import TimedAction, Timeline

COLOURS = {
    ActionKind.FORWARD: ("#2f62b5", "#b3cbf2", 44),
    ActionKind.BACKWARD: ("#23774a", "#a5d9bb", 42),
    ActionKind.BACKWARD_INPUT: ("#23774a", "#a5d9bb", 42),
    ActionKind.BACKWARD_WEIGHT: ("#8650a4", "#dcc3ea", 45),
    ActionKind.RECOMPUTE: ("#8f5f00", "#ecca8b", 43),
    ActionKind.GATHER: ("#666c75", "#c8ccd2", 100),
    ActionKind.SCATTER: ("#666c75", "#c8ccd2", 100),
    ActionKind.OPTIMIZER: ("#b3443a", "#efbdb7", 41),
}
"""Kind → its colour in pictures, a paler colour for later chunks, and its background colour code in a terminal."""
MEANS = {
    ActionKind.FORWARD: "F forward",
    ActionKind.BACKWARD: "B backward",
    ActionKind.BACKWARD_INPUT: "B backward",
    ActionKind.BACKWARD_WEIGHT: "W gradients of weights",
    ActionKind.RECOMPUTE: "R recomputed forward",
    ActionKind.GATHER: "parameters gathered, gradients scattered",
    ActionKind.SCATTER: "parameters gathered, gradients scattered",
    ActionKind.OPTIMIZER: "update",
}
"""Kind → its text in the legend of a picture."""
Time = Callable[[float], str]
_ON_COLOUR, _ON_PALE = "#fff", "#14171b"
_LABEL, _ROW, _BAR, _WIDTH, _LETTER = 52, 26, 20, 1200, 5.5


def timeline_text(timeline: Timeline, width: int = 100, colour: bool = False) -> str:
    """Return one line per rank, with time from left to right in `width` columns.

    Actions are labelled where the label fits.

    >>> from meshwright.pipeline import one_f_one_b, simulate_schedule
    >>> print(timeline_text(simulate_schedule(one_f_one_b(2, 2)), 36))
    0 F0  F1          BW0     BW1
    1     F0  BW0     F1  BW1
      makespan 9, span 9, bubble 33.3 %; holds 2, 1
    """
    digits = len(str(len(timeline.rows) - 1))
    scale = width / (timeline.makespan or 1.0)
    lines = [f"{rank:>{digits}} {_line(row, scale, colour)}" for rank, row in enumerate(timeline.rows)]
    return "\n".join([*(line.rstrip() for line in lines), " " * (digits + 1) + timeline_summary(timeline)])


def timeline_summary(timeline: Timeline, time: Time = "{:g}".format) -> str:
    """Return one line with makespan, span, bubble and the peak of each rank."""
    held = ", ".join(f"{n:g}" for n in timeline.peaks())
    spans = f"makespan {time(timeline.makespan)}, span {time(timeline.span)}"
    return f"{spans}, bubble {100 * timeline.bubble:.1f} %; holds {held}"


def _line(row: tuple[TimedAction, ...], scale: float, colour: bool) -> str:
    cells: list[str] = []
    column = 0
    for timed in row:
        start, end = round(timed.start * scale), round(timed.end * scale)
        if end <= start:
            continue
        label = _label(timed.action)[: end - start].ljust(end - start)
        cells.append(" " * (start - column))
        cells.append(f"\x1b[{COLOURS[timed.action.kind][2]}m{label}\x1b[0m" if colour else label)
        column = end
    return "".join(cells)


def _label(action: Action) -> str:
    """Return kind and microbatch. The chunk follows from the rank, or is shown by its shade."""
    return "&".join(f"{a.kind}{'' if a.microbatch == NOTHING else a.microbatch}" for a in action.atoms)


def timeline_svg(timeline: Timeline, time: Time = "{:g}".format) -> str:
    """Return the timeline as an SVG picture: one row per rank, later chunks of a rank paler, a tooltip for each action.

    `time` formats a time.
    """
    height = _ROW * len(timeline.rows) + 42
    scale = (_WIDTH - _LABEL - 8) / (timeline.makespan or 1.0)
    title = f"{timeline.schedule.name}: {timeline_summary(timeline, time)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif"'
        f' font-size="11" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    ]
    for rank, row in enumerate(timeline.rows):
        parts.append(f'<text x="4" y="{rank * _ROW + 18}">rank {rank}</text>')
        for timed in row:
            if timed.end > timed.start:
                parts += _boxes(timeline, rank, timed, scale, time)
    parts.append(f'<text x="{_LABEL}" y="{height - 26}">{escape(title)}</text>')
    parts += [*_legend(timeline, height - 8), "</svg>"]
    return "\n".join(parts) + "\n"


def _legend(timeline: Timeline, y: float) -> Iterator[str]:
    """Yield the legend of the colours that occur."""
    kinds = {atom.kind for _, atom in timeline.schedule.atoms()}
    named = {COLOURS[kind]: MEANS[kind] for kind in COLOURS if kind in kinds and kind in MEANS}
    x = float(_LABEL)
    for (colour, pale, _), meaning in named.items():
        for at, fill in ((x, colour), (x + 12, pale)):
            yield f'<rect x="{at:g}" y="{y - 9:g}" width="10" height="10" fill="{fill}"/>'
        yield f'<text x="{x + 28:g}" y="{y:g}">{meaning}</text>'
        x += 28 + _LETTER * len(meaning) + 18
    if _has_later_chunks(timeline):
        yield f'<text x="{x:g}" y="{y:g}">(pale: later chunks of a rank)</text>'


def _has_later_chunks(timeline: Timeline) -> bool:
    """True if a rank has several chunks of one way, so that some boxes are pale."""
    ranks, ways = range(len(timeline.rows)), timeline.schedule.ways
    return any(len(chunks_on(way, rank)) > 1 for rank in ranks for way in ways)


def _boxes(timeline: Timeline, rank: int, timed: TimedAction, scale: float, time: Time) -> Iterator[str]:
    """Yield a box for an action; actions that run side by side share its height."""
    atoms = list(timed.action.atoms)
    x, wide = _LABEL + timed.start * scale, (timed.end - timed.start) * scale
    for n, atom in enumerate(atoms):
        high = _BAR / len(atoms)
        y = rank * _ROW + 4 + n * high
        pale = atom.kind in COMPUTES and atom.chunk != min(chunks_on(_way(timeline, atom), rank))
        tip = f"{atom} at {time(timed.start)}, until {time(timed.end)}"
        yield (
            f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{high:.2f}"'
            f' fill="{COLOURS[atom.kind][pale]}" stroke="#fff" stroke-width="0.6"/>'
        )
        if wide >= 14 and high >= 10 and atom.microbatch != NOTHING:
            at = f'x="{x + wide / 2:.2f}" y="{y + high / 2 + 4:.2f}"'
            ink = _ON_PALE if pale else _ON_COLOUR
            yield f'<text {at} text-anchor="middle" fill="{ink}">{atom.microbatch}</text>'
        yield "</g>"


def _way(timeline: Timeline, atom: Action) -> Way:
    schedule = timeline.schedule
    return schedule.ways[schedule.way_of(atom.microbatch)]


def perfetto_trace(timeline: Timeline, seconds: float = 1.0) -> str:
    """Return the timeline as a trace for ui.perfetto.dev; `seconds` is the length of its unit of time."""
    us = 1e6 * seconds
    found = [
        {
            "name": str(timed.action),
            "cat": str(timed.action.kind),
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "ts": timed.start * us,
            "dur": (timed.end - timed.start) * us,
        }
        for rank, row in enumerate(timeline.rows)
        for timed in row
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(timeline.rows))
    ]
    return json.dumps({"traceEvents": [*names, *found], "displayTimeUnit": "ms"}) + "\n"
