"""Marks on whole tensors while a model is captured: they are noted, and done when the program is recorded per rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from meshwright.layout import Spec

from ._dist_tensor import DistTensor
from .torch_hooks import FakeTensor

Opaque = Callable[[Callable[..., Any], tuple[Any, ...], Callable[[], Any]], Any]
"""`note(op, args, shown)`: `op(*args)` is one node of the program; `shown()` is what it gives, of whole tensors."""


class _Watching(threading.local):
    note: Opaque | None = None
    parts: Opaque | None = None


_watching = _Watching()


@contextmanager
def capturing(note: Opaque) -> Generator[None]:
    """Inside, what is done to whole fake tensors as distributed ones is told to `note`, which gives the result."""
    before, _watching.note = _watching.note, note
    try:
        yield
    finally:
        _watching.note = before


def captured_whole(x: Any) -> Opaque | None:
    """Whom to tell about `x`, where it is a whole tensor, fake or a constant, of a model that is being captured."""
    whole = isinstance(x, FakeTensor) or (isinstance(x, Tensor) and not isinstance(x, DistTensor))
    return _watching.note if whole else None


def note_spec(x: Tensor, spec: Spec | None) -> None:
    """From now on it is known how `x` lies, a whole tensor of a model that is being captured."""
    vars(x)["_lies"] = spec


def noted_spec(x: Tensor) -> Spec | None:
    """How a whole tensor of a model that is being captured lies, where that is known."""
    return vars(x).get("_lies")


@contextmanager
def recording_parts(note: Opaque) -> Generator[None]:
    """Inside, calls that are one operator of a program, whatever they are made of, are told to `note`."""
    before, _watching.parts = _watching.parts, note
    try:
        yield
    finally:
        _watching.parts = before


def parts_recorded() -> bool:
    """True while what this thread does to parts is recorded as a program."""
    return _watching.parts is not None


def as_one(op: Callable[..., Any], args: tuple[Any, ...], shown: Callable[[], Any]) -> Any:
    """`op(*args)`; where parts are being recorded, one node that gives what `shown()` looks like."""
    return op(*args) if _watching.parts is None else _watching.parts(op, args, shown)
