"""Marks on whole tensors in a captured model.

They are noted, and applied when the program is recorded for each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import Tensor

from meshwright.layout import Spec, TorchValue

from .._torch_call import Arguments, TorchFunction
from ..torch_hooks import FakeTensor
from .dist_tensor import DistTensor

Opaque = Callable[[TorchFunction, Arguments, Callable[[], TorchValue]], TorchValue]
"""`note(op, args, shown)`: `op(*args)` is one node of the program; `shown()` returns its result for whole tensors."""


class _Watching(threading.local):
    note: Opaque | None = None
    parts: Opaque | None = None


_watching = _Watching()


@contextmanager
def capturing(note: Opaque) -> Generator[None]:
    """Pass calls on whole fake tensors that stand for distributed ones to `note` inside the block.

    It returns the result.
    """
    before, _watching.note = _watching.note, note
    try:
        yield
    finally:
        _watching.note = before


def in_capture() -> bool:
    """True inside a capture: the model runs with whole tensors, which stand for distributed ones."""
    return _watching.note is not None


def captured_whole(x: object) -> Opaque | None:
    """Return the function to call with marks on `x`, a whole tensor (fake or constant) of a model in capture.

    None outside of a capture, and for other values.
    """
    whole = isinstance(x, FakeTensor) or (isinstance(x, Tensor) and not isinstance(x, DistTensor))
    return _watching.note if whole else None


def note_spec(x: Tensor, spec: Spec | None) -> None:
    """Store the spec of `x`, a whole tensor of a model in capture."""
    vars(x)["_lies"] = spec


def noted_spec(x: Tensor) -> Spec | None:
    """Return the spec of a whole tensor of a model in capture; None if it is not known."""
    return vars(x).get("_lies")


@contextmanager
def recording_parts(note: Opaque) -> Generator[None]:
    """Pass calls that are one operator of a program inside the block to `note`."""
    before, _watching.parts = _watching.parts, note
    try:
        yield
    finally:
        _watching.parts = before


def parts_recorded() -> bool:
    """True while the calls of this thread on parts are recorded as a program."""
    return _watching.parts is not None


def record_as_one_node(op: TorchFunction, args: Arguments, shown: Callable[[], TorchValue]) -> TorchValue:
    """Return `op(*args)`; while parts are recorded, return one node whose result looks like `shown()`."""
    return op(*args) if _watching.parts is None else _watching.parts(op, args, shown)
