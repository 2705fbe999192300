"""Which carrier a thread talks to: its own, else the process's."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from ._carrier import Carrier
from ._errors import NoCarrierError


class _Here(threading.local):
    carrier: Carrier | None = None


class _Everywhere:
    carrier: Carrier | None = None


_here = _Here()


def current() -> Carrier:
    """The calling thread's carrier, else the process's; NoCarrierError where there is neither."""
    carrier = _here.carrier or _Everywhere.carrier
    if carrier is None:
        raise NoCarrierError(
            "a collective, or a tensor on a mesh",
            "no ranks: nothing was simulated or started in this thread",
            "a mesh needs ranks to live on",
            "mw.simulate(fn, ranks), or start the script with `meshwright run --ranks N script.py`",
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


def install(carrier: Carrier | None) -> None:
    """The whole process talks to `carrier`, except threads that `use` another; None takes it away."""
    _Everywhere.carrier = carrier
