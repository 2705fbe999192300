"""Picture of training steps whose collectives run beside their operators: `make pictures`.

The steps run on the test device (`tests/device`), in virtual time, so the picture is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from benchmarks._virtual_steps import COLLECTIVES, Chain, Machine, VirtualStep
from benchmarks.overlap import CASES, Overlapped, eager_overlapped, overlapped
from tests.device.inspection import Devices, Timing

PICTURE = Path(__file__).parent / "pictures" / "overlap.svg"
CHAIN = Chain(layers=6)
COLOURS = {"all_reduce": "#b3443a", "all_gather": "#8f5f00", "reduce_scatter": "#8650a4"}
OPERATORS = "#2f62b5"
ROWS = ("operators", "collectives")
_WIDTH, _LABEL, _ROW, _BAR, _TITLE = 1200, 90, 24, 18, 30


def steps(devices: Devices) -> Mapping[str, VirtualStep]:
    """Return the steps of the picture by their titles."""
    eager = eager_overlapped(devices, Machine(), CHAIN)
    static = overlapped(devices, Machine(), CHAIN, CASES["ZeRO-3"])
    return {**_both("eager step, data parallel", eager), **_both("static step, ZeRO-3", static)}


def _both(name: str, found: Overlapped) -> dict[str, VirtualStep]:
    return {f"{name}, without overlap": found.without, f"{name}, with overlap": found.overlapped}


def svg(found: Mapping[str, VirtualStep]) -> str:
    """Return the picture: a panel for each step with a row for each stream, all on one scale of time."""
    scale = (_WIDTH - _LABEL) / max(step.seconds for step in found.values())
    panel = _TITLE + len(ROWS) * _ROW
    parts = [part for at, item in enumerate(found.items()) for part in _panel(*item, at * panel, scale)]
    height = len(found) * panel + _TITLE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
            *parts,
            *_legend(height - 10),
            "</svg>\n",
        ]
    )


def _panel(title: str, step: VirtualStep, top: float, scale: float) -> Iterator[str]:
    yield f'<text x="0" y="{top + 20}" font-weight="bold">{escape(title)}: {step.seconds * 1e6:.0f} µs</text>'
    for row, name in enumerate(ROWS):
        y = top + _TITLE + row * _ROW
        yield f'<text x="0" y="{y + 13}">{name}</text>'
        for start, end, colour in _bars(step, row):
            x = _LABEL + (start - step.begin) * scale
            yield f'<rect x="{x:.1f}" y="{y}" width="{(end - start) * scale:.1f}" height="{_BAR}" fill="{colour}"/>'


def _bars(step: VirtualStep, row: int) -> list[tuple[float, float, str]]:
    """Return start, end and colour of the work in a row. Operators without a gap are one bar."""
    work = sorted((t for t in step.work if (t.name in COLLECTIVES) == bool(row)), key=lambda t: t.start)
    bars: list[tuple[float, float, str]] = []
    for t in work:
        follows = bars and not row and t.start - bars[-1][1] < 1e-9
        start = bars.pop()[0] if follows else t.start
        bars.append((start, t.end, _colour(t)))
    return bars


def _colour(t: Timing) -> str:
    return COLOURS.get(t.name, OPERATORS)


def _legend(y: float) -> Iterator[str]:
    for at, (name, colour) in enumerate({"operators": OPERATORS, **COLOURS}.items()):
        x = _LABEL + at * 140
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17}" y="{y}">{name}</text>'


def main() -> None:
    PICTURE.write_text(svg(steps(Devices())), encoding="utf-8")


if __name__ == "__main__":
    main()
