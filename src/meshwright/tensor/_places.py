"""Where in the forward pass a conversion was made, kept for those who ask what its gradient's communication is for.

Nothing is kept while nobody asks.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

from meshwright.layout import module_path, user_frame

from .torch_hooks import backward_running


class Place(NamedTuple):
    """A line of the user's code, and the path of the module that it runs in."""

    line: str
    module: str


class _Asking:
    """How many threads want places to be kept."""

    count = 0


_backward: set[CodeType] = set()


def keep_place(ctx: Any) -> None:
    """Notes in an autograd function's context where its forward pass was called, if anybody asks."""
    if _Asking.count:
        ctx.place = Place(user_frame(), module_path())


def is_backward(function: Any) -> None:
    """The method is one whose `ctx` may have a place."""
    _backward.add(function.__code__)


@contextmanager
def places_kept() -> Generator[None]:
    """Inside, conversions of all threads know where they were made."""
    _Asking.count += 1
    try:
        yield
    finally:
        _Asking.count -= 1


def in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    return backward_running() != -1


def place_of_gradient(frame: FrameType | None) -> Place | None:
    """Where the conversion was made whose backward pass the frame is inside of; None where that is not known."""
    while frame is not None:
        if frame.f_code in _backward:
            return getattr(frame.f_locals["ctx"], "place", None)
        frame = frame.f_back
    return None
