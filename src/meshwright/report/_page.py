"""One self-contained page: no script, no other file, no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.pipeline import Timeline, timeline_svg
from meshwright.search import Account, Communication, OtherPlan, beside, count, seconds, share, size

from ._curve import drawn
from ._html import Markup, element, folded, joined, scrolled, table
from ._style import STYLE
from ._tree import tree

DRAWN = 4000
"""Most actions of a timeline that are drawn; the first ones are."""
CURVES = 16
"""Most ranks whose memory is drawn."""
OPEN = 60
"""Tables of at most so many rows are open at first."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
FORBIDDEN = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127])
"""Characters that a page must not contain."""


def page(account: Account, measured: Mapping[str, float] | None = None) -> str:
    """Return the account as HTML; `measured` maps names to seconds and bytes, shown beside the predicted numbers."""
    parts = [(title, body) for title, body in _parts(account, measured) if body]
    return document(account.what, list(_header(account)), parts)


def document(title: str, header: Sequence[str], parts: Sequence[tuple[str, Markup]]) -> str:
    """Return a page with a header and titled parts, and links to them."""
    links = [element("li", element("a", name, href=f"#part-{n}")) for n, (name, _) in enumerate(parts)]
    sections = [
        element("section", element("h2", name, id=f"part-{n}"), body, aria_labelledby=f"part-{n}")
        for n, (name, body) in enumerate(parts)
    ]
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        element("title", f"Meshwright: {title}"),
        element("style", Markup(STYLE)),
    )
    body = element(
        "body",
        element("header", *header, element("nav", element("ul", *links), aria_label="parts of this page")),
        element("main", *sections),
        element("footer", "Written by Meshwright. This page needs no network."),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n".translate(FORBIDDEN)


def _header(account: Account) -> Iterator[Markup]:
    yield element("h1", account.what)
    verdict = element("span", " It does not fit.", class_="wrong") if not account.fits else Markup()
    rates = [("rates", str(account.throughput))] if account.throughput else []
    help_most = [("what would help most", str(account.changes[0]))] if account.changes else []
    told = (
        *rates,
        ("seconds per step", seconds(account.seconds)),
        ("fullest rank", joined([f"{size(account.nbytes)} of {size(account.memory_limit)}", verdict])),
        *help_most,
        ("plan", account.how),
        ("where", account.where),
    )
    rows = [joined([element("dt", name), element("dd", value)]) for name, value in told]
    yield element("dl", *rows)


def _parts(account: Account, measured: Mapping[str, float] | None) -> Iterator[tuple[str, Markup]]:
    yield "Bottlenecks", _why(account)
    yield "Predicted and measured", _measured(account, measured) if measured else Markup()
    yield "Layouts of tensors", tree(account.laid)
    yield "Communications", _sent(account)
    yield "The pipeline", _timeline(account.timeline) if account.timeline else Markup()
    yield "Memory", _memory(account)
    yield "Other plans", _others("this plan and the other plans", account, account.rivals)
    yield "Known recipes", _others("this plan and recipes for similar models", account, account.recipes)
    yield "What this assumes", _lines(account.assumed)
    yield "What would change it", _lines(map(str, account.changes))
    yield "All settings of the plan", _decided(account)


def _why(account: Account) -> Markup:
    whole = sum(account.spent.values())
    kinds = {name: f"k{n % 6}" for n, name in enumerate(account.spent)}
    bar = [
        element("span", class_=kinds[name], style=f"flex-grow:{s / whole:.4f}", title=f"{name}: {seconds(s)}")
        for name, s in account.spent.items()
        if s > 0 and whole
    ]
    rows = [
        (joined([element("span", class_=f"key {kinds[name]}"), name]), seconds(s), share(s, whole))
        for name, s in account.spent.items()
    ]
    return joined(
        [
            element("ul", *(element("li", line) for line in account.why)),
            element("div", *bar, class_="bar", aria_hidden="true"),
            table("seconds of a step by part", ("part", "seconds", "of the step"), rows, {1, 2}),
        ]
    )


def _measured(account: Account, measured: Mapping[str, float]) -> Markup:
    head = ("what", "predicted", "measured", "off by")
    return table("predicted and measured values", head, beside(account, measured), {1, 2, 3})


def _sent(account: Account) -> Markup:
    if not account.sent:
        return element("p", "No communication.")
    sourced = any(row.source for row in account.sent)
    head, rows = (*Communication.HEAD, "line"), list[tuple[str, ...]]()
    for row in account.sent:
        kind, what, *others = row.cells
        source = element("code", row.source) if row.source else ""
        rows.append((kind, element("code", what) if sourced else what, *others, source))
    caption = "in order of execution: calls per step, bytes per call, seconds of all calls, and exposed seconds"
    shown = table(caption, head, rows, {4, 5, 6, 7})
    total = f"{count(len(rows))} rows, {seconds(sum(s.seconds for s in account.sent))} in all"
    return folded(total, shown, is_open=len(rows) <= OPEN)


def _timeline(timeline: Timeline) -> Markup:
    picture, cut = timeline, ""
    if sum(map(len, timeline.rows)) > DRAWN:
        most = DRAWN // len(timeline.rows)
        named = replace(timeline.schedule, name=f"{timeline.schedule.name}, its beginning")
        picture = replace(timeline, schedule=named, rows=tuple(row[:most] for row in timeline.rows))
        cut = f" Of {count(sum(map(len, timeline.rows)))} actions, only the first are drawn."
    said = (
        f"{timeline.schedule.name}: {seconds(timeline.makespan)}, of which ranks wait "
        f"{share(timeline.bubble, 1.0)} on average.{cut}"
    )
    rows = [
        (f"rank {rank}", count(len(row)), seconds(busy), seconds(timeline.makespan - busy), f"{held:g}")
        for rank, (row, busy, held) in enumerate(zip(timeline.rows, timeline.busy, timeline.peaks(), strict=True))
    ]
    head = ("rank", "actions", "computes", "waits", "chunks of microbatches in flight")
    return joined(
        [
            element("p", said),
            element(
                "div", scrolled("time line of the pipeline", Markup(timeline_svg(picture, seconds))), class_="drawing"
            ),
            table("seconds of each rank of the pipeline", head, rows, {1, 2, 3, 4}),
        ]
    )


def _memory(account: Account) -> Markup:
    kinds, rows = account.held_table()
    pictures = [
        element("div", scrolled(f"memory of {curve.rank}", drawn(curve, account.memory_limit)), class_="curve")
        for curve in account.curves[:CURVES]
    ]
    shown = table("bytes at the peak, by kind", ("rank", *kinds, "in all"), rows, set(range(1, len(kinds) + 2)))
    return joined([shown, *pictures])


def _lines(lines: Iterable[str]) -> Markup:
    items = [element("li", line) for line in lines]
    return element("ul", *items) if items else Markup()


def _others(caption: str, account: Account, others: Sequence[OtherPlan]) -> Markup:
    if not others:
        return Markup()
    own = [("this plan", seconds(account.seconds), "1.000", size(account.nbytes), "")]
    rows = [(r.how, seconds(r.seconds), f"{r.seconds / account.seconds:.3f}", size(r.nbytes), r.why) for r in others]
    head = ("plan", "seconds per step", "relative", "bytes per rank", "compared with this plan")
    return table(caption, head, [*own, *rows], {1, 2, 3})


def _decided(account: Account) -> Markup:
    rows = [(name, str(value)) for name, value in account.decided.items()]
    return table("settings of the plan", ("name", "value"), rows) if rows else Markup()
