"""Draw a rank's memory over time."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from meshwright.search import MemoryCurve, seconds, size

from ._html import Markup

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, LETTERS = 1200, 170, 70, 1192, 14, 24, 14


@dataclass(frozen=True, slots=True)
class _Scale:
    """The scale of a picture: time and bytes to coordinates."""

    end: float
    top: float

    def x(self, when: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * when / self.end:.1f}"

    def y(self, held: float) -> str:
        return f"{TOP + (HEIGHT - TOP - BOTTOM) * (1 - held / self.top):.1f}"


def drawn(curve: MemoryCurve, memory_limit: float) -> Markup:
    """Return the picture of the bytes held over time, with a line for the limit if it is at most twice the peak."""
    end = max((when for when, _ in curve.points), default=0.0) or 1.0
    most = max((held for _, held in curve.points), default=0.0)
    near = memory_limit <= 2 * most
    scale = _Scale(end, 1.05 * (max(most, memory_limit) if near else most) or 1.0)
    said = escape(f"{curve.rank}: at most {size(most)} of {size(memory_limit)}")
    across = f'x1="{LEFT}" x2="{RIGHT}"'
    limit = f'<line class="limit" {across} y1="{scale.y(memory_limit)}" y2="{scale.y(memory_limit)}"/>' if near else ""
    if near and abs(float(scale.y(memory_limit)) - float(scale.y(most))) > LETTERS:
        text = escape(size(memory_limit))
        limit += f'<text x="{LEFT - 6}" y="{scale.y(memory_limit)}" dy="4" text-anchor="end">{text}</text>'
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}"><title>{said}</title>'
        f'<path class="area" d="{_steps(curve, scale)}"/>'
        f'<line class="axis" {across} y1="{scale.y(0.0)}" y2="{scale.y(0.0)}"/>{limit}'
        f'<text x="{LEFT - 6}" y="{scale.y(most)}" dy="4" text-anchor="end">{escape(size(most))}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">{said}</text>'
        f'<text x="{RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(seconds(end))}</text></svg>'
    )


def _steps(curve: MemoryCurve, scale: _Scale) -> str:
    """Return the path of a step function: a constant height from each change to the next."""
    body = "".join(f"H{scale.x(when)}V{scale.y(held)}" for when, held in curve.points)
    return f"M{scale.x(0.0)} {scale.y(0.0)}{body}V{scale.y(0.0)}Z"
