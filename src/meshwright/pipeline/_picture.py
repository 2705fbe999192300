"""A timeline to look at: as text in a terminal, as an SVG picture, and as a trace for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape

from ._action import COMPUTES, NOTHING, Action, Kind
from ._simulate import Timed, Timeline

COLOURS = {
    Kind.FORWARD: ("#4c78c8", 44),
    Kind.BACKWARD: ("#3f9d6b", 42),
    Kind.BACKWARD_INPUT: ("#3f9d6b", 42),
    Kind.BACKWARD_WEIGHT: ("#b58ac9", 45),
    Kind.RECOMPUTE: ("#d9a441", 43),
    Kind.GATHER: ("#8a8f98", 100),
    Kind.SCATTER: ("#8a8f98", 100),
    Kind.OPTIMIZER: ("#c8584c", 41),
}
"""Kind → its colour in pictures, and its background in a terminal."""
_LABEL, _ROW, _BAR, _WIDTH = 52, 26, 20, 1200
_LATER_CHUNKS_OPACITY = 0.7


def terminal(timeline: Timeline, width: int = 100, colour: bool = False) -> str:
    """One line per rank, time from left to right in `width` columns; F, B, W and R with their microbatch where it fits.

    >>> from meshwright.pipeline import one_f_one_b, simulate
    >>> print(terminal(simulate(one_f_one_b(2, 2)), 36))
    0 F0  F1          BW0     BW1
    1     F0  BW0     F1  BW1
      makespan 9, span 9, bubble 33.3 %; holds 2, 1
    """
    digits = len(str(len(timeline.rows) - 1))
    scale = width / (timeline.makespan or 1.0)
    lines = [f"{rank:>{digits}} {_line(row, scale, colour)}" for rank, row in enumerate(timeline.rows)]
    return "\n".join([*(line.rstrip() for line in lines), " " * (digits + 1) + summary(timeline)])


def summary(timeline: Timeline) -> str:
    """Makespan, span, bubble and what ranks hold, in one line."""
    held = ", ".join(f"{n:g}" for n in timeline.peaks())
    return f"makespan {timeline.makespan:g}, span {timeline.span:g}, bubble {100 * timeline.bubble:.1f} %; holds {held}"


def _line(row: tuple[Timed, ...], scale: float, colour: bool) -> str:
    cells: list[str] = []
    column = 0
    for timed in row:
        start, end = round(timed.start * scale), round(timed.end * scale)
        if end <= start:
            continue
        label = _label(timed.action)[: end - start].ljust(end - start)
        cells.append(" " * (start - column))
        cells.append(f"\x1b[{COLOURS[timed.action.kind][1]}m{label}\x1b[0m" if colour else label)
        column = end
    return "".join(cells)


def _label(action: Action) -> str:
    """Kind and microbatch: the chunk follows from the rank, or is seen by its shade."""
    return "&".join(f"{a.kind}{'' if a.microbatch == NOTHING else a.microbatch}" for a in action.atoms)


def svg(timeline: Timeline) -> str:
    """The timeline as a picture: a row per rank, later chunks of a rank paler, a tooltip for each action."""
    height = _ROW * len(timeline.rows) + 24
    scale = (_WIDTH - _LABEL - 8) / (timeline.makespan or 1.0)
    title = f"{timeline.schedule.name}: {summary(timeline)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif"'
        f' font-size="11"><title>{escape(title)}</title><rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    ]
    for rank, row in enumerate(timeline.rows):
        parts.append(f'<text x="4" y="{rank * _ROW + 18}">rank {rank}</text>')
        for timed in row:
            if timed.end > timed.start:
                parts += _boxes(timeline, rank, timed, scale)
    parts.append(f'<text x="{_LABEL}" y="{height - 8}">{escape(title)}</text></svg>')
    return "\n".join(parts) + "\n"


def _boxes(timeline: Timeline, rank: int, timed: Timed, scale: float) -> Iterator[str]:
    """A box for an action; those side by side share its height."""
    atoms = list(timed.action.atoms)
    x, wide = _LABEL + timed.start * scale, (timed.end - timed.start) * scale
    for n, atom in enumerate(atoms):
        high = _BAR / len(atoms)
        y = rank * _ROW + 4 + n * high
        pale = atom.kind in COMPUTES and atom.chunk != min(_chunks(timeline, rank, atom))
        tip = f"{atom} at {timed.start:g}, until {timed.end:g}"
        yield (
            f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{high:.2f}"'
            f' fill="{COLOURS[atom.kind][0]}" stroke="#fff" stroke-width="0.6"'
            f' opacity="{_LATER_CHUNKS_OPACITY if pale else 1}"/>'
        )
        if wide >= 14 and high >= 10 and atom.microbatch != NOTHING:
            at = f'x="{x + wide / 2:.2f}" y="{y + high / 2 + 4:.2f}"'
            yield f'<text {at} text-anchor="middle" fill="#fff">{atom.microbatch}</text>'
        yield "</g>"


def _chunks(timeline: Timeline, rank: int, atom: Action) -> list[int]:
    schedule = timeline.schedule
    way = schedule.ways[schedule.routes[atom.microbatch] if schedule.routes else 0]
    return [c for c, owner in enumerate(way) if owner == rank]


def trace(timeline: Timeline, seconds: float = 1.0) -> str:
    """The timeline as a trace that ui.perfetto.dev opens; `seconds` is the length of a unit of its times."""
    us = 1e6 * seconds
    found = [
        {
            "name": str(timed.action), "cat": str(timed.action.kind), "ph": "X", "pid": 0, "tid": rank,
            "ts": timed.start * us, "dur": (timed.end - timed.start) * us,
        }
        for rank, row in enumerate(timeline.rows)
        for timed in row
    ]  # fmt: skip
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(timeline.rows))
    ]
    return json.dumps({"traceEvents": [*names, *found], "displayTimeUnit": "ms"}) + "\n"
