"""Places in the forward pass at which conversions were made, to attribute the communication of their gradients.

Nothing is stored unless a place is needed.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import NamedTuple

from meshwright.layout import TorchValue, module_path, user_frame

from .._torch_call import TorchFunction
from ..torch_hooks import backward_running


class CallSite(NamedTuple):
    """A line of the user's code, and the path of the module that it runs in."""

    line: str
    module: str


class _Asking:
    """Number of threads that need places."""

    count = 0


_backward: set[CodeType] = set()


def keep_call_site(ctx: TorchValue) -> None:
    """Store the place of the forward call in an autograd function's context, if places are needed."""
    if _Asking.count:
        ctx.place = CallSite(user_frame(), module_path())


def is_backward(function: TorchFunction) -> None:
    """Register a `backward` method whose `ctx` may have a place."""
    _backward.add(function.__code__)


@contextmanager
def call_sites_kept() -> Generator[None]:
    """Store the places of conversions of all threads inside the block."""
    _Asking.count += 1
    try:
        yield
    finally:
        _Asking.count -= 1


def in_backward() -> bool:
    """True if this thread is in a backward pass."""
    return backward_running() != -1


def call_site_of_gradient(frame: FrameType | None) -> CallSite | None:
    """Return the place of the conversion whose backward pass contains the frame; None if it is not known."""
    while frame is not None:
        if frame.f_code in _backward:
            return getattr(frame.f_locals["ctx"], "place", None)
        frame = frame.f_back
    return None
