"""What a call is for, as a number: two ranks that run the same program have the same numbers.

Two collectives of the same kind, shape and dtype may be made for different tensors, on ranks that run their operators
in another order. So a call has, beside its form, the number of what it is for: the layer that makes the call puts the
number here, and the guard of processes compares it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar


class Identity(threading.local):
    """What this thread's next calls are for: a number of 64 bits, and the name of an operator or a program."""

    what: tuple[int, str] = (0, "")


identity = Identity()

_MOST_FACTS = 4096
facts: dict[str, str] = {}
"""What numbers are made of, by name: versions, seeds, the tensors that were laid. Shown where numbers differ."""


def note_fact(name: str, value: object) -> None:
    """Keep a fact; the oldest one is dropped if there are too many."""
    facts[name] = str(value)
    if len(facts) > _MOST_FACTS:
        del facts[next(iter(facts))]


class _Compared:
    """True once this process is a rank of several that compare their calls; else the functions to call then."""

    here = False
    told: ClassVar[list[Callable[[], None]]] = []


def when_compared(function: Callable[[], None]) -> None:
    """Call `function` once this process is a rank of several that compare their calls; now, if it is one already."""
    if _Compared.here:
        function()
    else:
        _Compared.told.append(function)


def is_compared() -> bool:
    """True if this process is a rank of several that compare their calls."""
    return _Compared.here


def calls_are_compared() -> None:
    """Tell all who want to know that this process compares its calls with other processes."""
    _Compared.here = True
    for function in _Compared.told:
        function()
