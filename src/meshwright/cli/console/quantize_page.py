"""The HTML page of `meshwright quantize`: no script, no other file, no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.report import Markup, document, element, table

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1200, 190, 70, 14, 24


def page(told: Mapping[str, Any]) -> str:
    """Return the result as HTML: sizes, perplexity, the error of each layer, and the layers that are left out.

    `told` is the object that `--json` prints.
    """
    title = f"Quantization of {told['model']}"
    header = [element("h1", title), element("p", f"{told['scheme']}: {told['numbers']}")]
    summary = table("before and after", ("", "before", "after"), list(_summary(told)), {1, 2})
    rows = [(name, f"{error:.3g}") for name, error in told["errors"].items()]
    errors = Markup(picture(told["errors"]) + table("relative error of each layer", ("layer", "error"), rows, {1}))
    parts = [("Sizes and perplexity", summary), ("Errors", errors)]
    if told["left_out"]:
        left_out = table("linear layers that stay", ("layer", "reason"), list(told["left_out"].items()))
        parts.append(("Left out", left_out))
    return document(title, header, parts)


def _summary(told: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    sizes, measured = told["bytes"], told["perplexity"]
    yield "bytes", f"{sizes['before']:,}", f"{sizes['after']:,}"
    if measured["before"] is not None:
        yield "perplexity", f"{measured['before']:.4f}", f"{measured['after']:.4f}"


def picture(errors: Mapping[str, float]) -> Markup:
    """Return a chart with a bar for the error of each layer, in the order of the model."""
    largest = max(errors.values(), default=0.0) or 1.0
    step = (WIDTH - LEFT) / max(1, len(errors))
    bottom = HEIGHT - BOTTOM
    bars = list[Markup]()
    for at, (name, error) in enumerate(errors.items()):
        height = max(1.0, (bottom - TOP) * error / largest)
        bar = {"x": f"{LEFT + at * step:.1f}", "y": f"{bottom - height:.1f}", "height": f"{height:.1f}"}
        said = element("title", f"{name}: {error:.3g}")
        bars.append(element("rect", said, class_="area", width=f"{max(1.0, step - 2):.1f}", **bar))
    label = f"relative error of {len(errors)} layers, at most {largest:.3g}"
    axis = element("line", class_="axis", x1=LEFT, x2=WIDTH, y1=bottom, y2=bottom)
    top = element("text", f"{largest:.2g}", x=LEFT - 6, y=TOP, dy=4, text_anchor="end")
    below = element("text", label, x=LEFT, y=HEIGHT - 8)
    svg = element("svg", *bars, axis, top, below, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    return element("div", element("div", svg, class_="wide"), class_="curve")
