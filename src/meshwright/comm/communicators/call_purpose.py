"""The purpose of a call as a number: ranks that run the same program get the same numbers.

Two collectives of the same kind, shape and dtype may be made for different tensors, if ranks run their operators in
different orders. So a call has, beside its form, a number for its purpose. The layer that makes the call sets the
number here, and the guard compares it between processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar


class CallPurpose(threading.local):
    """Purpose of this thread's next calls: a 64-bit number, and the name of an operator or a program."""

    what: tuple[int, str] = (0, "")


call_purpose = CallPurpose()

_MOST_FACTS = 4096
facts: dict[str, str] = {}
"""Inputs of the numbers by name: versions, seeds, tensors that were placed.

Errors about different numbers show them.
"""


def note_fact(name: str, value: object) -> None:
    """Store a fact; the oldest fact is dropped if there are too many."""
    facts[name] = str(value)
    if len(facts) > _MOST_FACTS:
        del facts[next(iter(facts))]


def is_noted(name: str) -> bool:
    """True if there is a fact of this name."""
    return name in facts


class _Compared:
    """State of the comparison of calls between ranks.

    `here` is True once this process compares its calls. `told` are functions to call at that time.
    """

    here = False
    told: ClassVar[list[Callable[[], None]]] = []


def when_compared(function: Callable[[], None]) -> None:
    """Call `function` once this process compares its calls with other ranks; at once if it does so already."""
    if _Compared.here:
        function()
    else:
        _Compared.told.append(function)


def is_compared() -> bool:
    """True if this process compares its calls with other ranks."""
    return _Compared.here


def calls_are_compared() -> None:
    """Record that this process compares its calls with other processes, and call the registered functions."""
    _Compared.here = True
    for function in _Compared.told:
        function()
