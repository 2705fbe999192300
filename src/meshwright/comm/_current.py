"""Which carrier a thread talks to: its own, else the process's."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from ._carrier import Carrier
from ._errors import NoCarrierError


class _Here(threading.local):
    carrier: Carrier | None = None
    reads: int = 0


class _Everywhere:
    carrier: Carrier | None = None


_here = _Here()


def installed() -> Carrier | None:
    """The calling thread's carrier, else the process's; None where there is neither."""
    _here.reads += 1
    return _here.carrier or _Everywhere.carrier


def reads_of_rank() -> int:
    """Return how often this thread has asked for its carrier, which tells the rank."""
    return _here.reads


def current() -> Carrier:
    """What `installed` gives; NoCarrierError where that is nothing."""
    _here.reads += 1
    carrier = _here.carrier or _Everywhere.carrier
    if carrier is None:
        raise NoCarrierError(
            "a collective, or a tensor on a mesh",
            "no ranks: nothing was simulated or started in this thread",
            "a mesh needs ranks to live on",
            "mw.simulate(fn, ranks); in a script, mw.init_process() first, and `meshwright run --ranks N script.py`",
        )
    return carrier


@contextmanager
def use(carrier: Carrier) -> Generator[Carrier]:
    """The calling thread talks to `carrier` inside the block."""
    before = _here.carrier
    _here.carrier = carrier
    try:
        yield carrier
    finally:
        _here.carrier = before


@contextmanager
def carrying(carrier: Carrier) -> Generator[Carrier]:
    """As `use`; where the process has one carrier for all its threads, those of backward passes talk to it too."""
    if _here.carrier is not None:
        with use(carrier):
            yield carrier
        return
    before = _Everywhere.carrier
    _Everywhere.carrier = carrier
    try:
        yield carrier
    finally:
        _Everywhere.carrier = before


def install(carrier: Carrier | None) -> None:
    """The whole process talks to `carrier`, except threads that `use` another; None takes it away."""
    _Everywhere.carrier = carrier
