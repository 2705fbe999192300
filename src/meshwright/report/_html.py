"""Build HTML safely: every text is escaped, unless `element` made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from meshwright.layout import escaped


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, *inside: str, **attributes: str | int | None) -> Markup:
    """Return an element; attributes that are None are left out, as is a trailing `_` of an attribute's name.

    >>> element("p", "1 < 2 ", element("b", "bold"), class_="note")
    '<p class="note">1 &lt; 2 <b>bold</b></p>'
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_safe(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{told}>{joined(inside)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Return the parts joined; parts that are no HTML yet are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else _safe(part) for part in parts))


def _safe(text: str) -> str:
    """Return the text as HTML shows it, with its control characters and marks of direction as escapes."""
    return escape(escaped(text, keep_lines=True))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> Markup:
    """Return a table whose first column names its rows; `numbers` are aligned right, empty columns are left out.

    It scrolls by itself if the window is narrow, also by the keyboard; its caption stays in place.
    """
    every = [tuple(row) for row in rows]
    shown = _shown_columns(head, every)
    classes = dict.fromkeys(numbers, "number")
    top = element("tr", *(element("th", head[at], scope="col", class_=classes.get(at)) for at in shown))
    first, *others = shown
    body = [
        element(
            "tr",
            element("th", row[first], scope="row", class_=classes.get(first)),
            *(element("td", row[at], class_=classes.get(at)) for at in others),
        )
        for row in every
    ]
    title = element("caption", element("span", caption))
    return scrolled(caption, element("table", title, element("thead", top), element("tbody", *body)))


def _shown_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the indices of the columns with some text, and of those without a name; without rows, all columns."""
    return [at for at, name in enumerate(head) if not name or not rows or any(row[at] for row in rows)]


def scrolled(label: str, inside: Markup) -> Markup:
    """Return a wide element inside a part of the page that scrolls sideways."""
    return element("div", inside, class_="wide", role="region", aria_label=label, tabindex=0)


def folded(summary: str | Markup, *inside: str, is_open: bool = False) -> Markup:
    """Return a section that is shown when its summary is clicked."""
    return element("details", element("summary", summary), *inside, open="open" if is_open else None)
