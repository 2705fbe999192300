"""A progress bar on a terminal, after a while; no output otherwise."""

from __future__ import annotations

import io
import time

from rich.console import Console
from rich.progress import Progress

from meshwright.search import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text_of(out: io.StringIO, patience: float, silent: bool = False) -> str:
    with progress_bar("plans for 8 ranks", silent, out, patience) as on_step:
        on_step(1, 2)
        time.sleep(0.3)
        on_step(2, 2)
    return out.getvalue()


def test_a_bar_is_shown_after_a_while() -> None:
    assert "plans for 8 ranks" in text_of(Terminal(), 0.05)


def test_a_quick_search_shows_no_bar() -> None:
    assert text_of(Terminal(), 60.0) == ""


def test_no_bar_is_shown_without_a_terminal() -> None:
    assert text_of(io.StringIO(), 0.0) == ""
    assert text_of(Terminal(), 0.0, silent=True) == ""


def test_a_bar_inside_a_bar_does_no_harm() -> None:
    with Progress(console=Console(file=Terminal())):
        text_of(Terminal(), 0.0)
