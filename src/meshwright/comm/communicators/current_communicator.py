"""The current communicator of a thread: its own, otherwise that of the process."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from .._errors import NoCommunicatorError
from .communicator import Communicator


class _Here(threading.local):
    carrier: Communicator | None = None
    reads: int = 0


class _Everywhere:
    carrier: Communicator | None = None


_here = _Here()


def installed_communicator() -> Communicator | None:
    """Return the calling thread's communicator, otherwise the process's; None if there is neither."""
    _here.reads += 1
    return _here.carrier or _Everywhere.carrier


def communicator_lookups() -> int:
    """Return the number of times that this thread has asked for its communicator, and thus could know its rank."""
    return _here.reads


def current_communicator() -> Communicator:
    """Return the installed communicator.

    Raises:
        NoCarrierError: there is none.
    """
    _here.reads += 1
    carrier = _here.carrier or _Everywhere.carrier
    if carrier is None:
        raise NoCommunicatorError(
            "a collective, or a tensor on a mesh",
            "no ranks: nothing was simulated or started in this thread",
            "a mesh and its collectives need ranks",
            "call mw.simulate(fn, ranks); or call mw.init_process() first in a script, and start the script with "
            "`meshwright run --ranks N script.py`",
        )
    return carrier


@contextmanager
def using_communicator(carrier: Communicator) -> Generator[Communicator]:
    """Use `carrier` as the calling thread's communicator inside the block."""
    before = _here.carrier
    _here.carrier = carrier
    try:
        yield carrier
    finally:
        _here.carrier = before


@contextmanager
def using_in_all_threads(carrier: Communicator) -> Generator[Communicator]:
    """Use `carrier` inside the block, for all threads if the process has one communicator for all of them.

    So the threads of backward passes use it too.
    """
    if _here.carrier is not None:
        with using_communicator(carrier):
            yield carrier
        return
    before = _Everywhere.carrier
    _Everywhere.carrier = carrier
    try:
        yield carrier
    finally:
        _Everywhere.carrier = before


def install_communicator(carrier: Communicator | None) -> None:
    """Set the communicator of the whole process; threads inside `use` keep their own. None removes it."""
    _Everywhere.carrier = carrier
