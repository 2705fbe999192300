"""The HTML page of `meshwright conformance`: no script, no other file, no network."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.conformance import Report, Result, Use, counted
from meshwright.report import Markup, document, element, table

LEVEL_NAMES = {
    0: "device",
    1: "operators",
    2: "simulated ranks",
    3: "transport",
    4: "training",
    5: "speed",
}


def page(report: Report, uses: Sequence[Use]) -> str:
    """Return the report as HTML: the machine, its uses, the checks that failed, and all checks by level."""
    title = "Conformance of a device" if report.facts is None else f"Conformance of {report.facts.device}"
    header = [
        element("h1", title),
        element("p", str(report.facts or "no worker started")),
        element("p", f"{report.on}: {counted(report.results)}"),
    ]
    parts = [("Uses", table("what the machine may be used for", ("use", "answer", "reason"), _uses(uses)))]
    failed = [each for each in report.results if each.failed]
    if failed:
        parts.append(("Failed", _results("checks that failed", failed)))
    for level, name in LEVEL_NAMES.items():
        found = [each for each in report.results if each.level == level]
        if found:
            parts.append((f"Level {level}: {name}", _results(f"checks of level {level}", found)))
    return document(title, header, parts)


def _uses(uses: Sequence[Use]) -> list[tuple[str, str, str]]:
    return [(each.use, each.answer, each.reason) for each in uses]


def _results(caption: str, results: Sequence[Result]) -> Markup:
    rows = [(each.name, each.state, each.detail, f"{each.seconds:.2f}") for each in results]
    return table(caption, ("check", "result", "detail", "seconds"), rows, numbers=(3,))
