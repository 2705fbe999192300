"""The current communicator of a thread: its own, otherwise that of the process."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from .._errors import NoCommunicatorError
from .communicator import Communicator


class _Thread:
    """The communicator of a thread, the ranks of its world, and the number of times that it was asked for.

    Without ranks, the world has all ranks of the communicator.
    """

    __slots__ = ("communicator", "reads", "world")

    def __init__(self) -> None:
        self.communicator: Communicator | None = None
        self.world: tuple[int, ...] | None = None
        self.reads = 0


class _Here(threading.local):
    """The calling thread; each attribute of a `threading.local` takes 0.1 us, so there is only one."""

    def __init__(self) -> None:
        self.thread = _Thread()


class _Everywhere:
    communicator: Communicator | None = None


_here = _Here()


def installed_communicator() -> Communicator | None:
    """Return the calling thread's communicator, otherwise the process's; None if there is neither."""
    here = _here.thread
    here.reads += 1
    return here.communicator or _Everywhere.communicator


def communicator_lookups() -> int:
    """Return the number of times that this thread has asked for its communicator, and thus could know its rank."""
    return _here.thread.reads


def current_communicator() -> Communicator:
    """Return the installed communicator.

    Raises:
        NoCommunicatorError: there is none.
    """
    here = _here.thread
    here.reads += 1
    communicator = here.communicator or _Everywhere.communicator
    if communicator is None:
        raise NoCommunicatorError(
            "a collective, or a tensor on a mesh",
            "no ranks: nothing was simulated or started in this thread",
            "a mesh and its collectives need ranks",
            "call mw.simulate(fn, ranks); or call mw.init_process() first in a script, and start the script with "
            "`meshwright run --ranks N script.py`",
        )
    return communicator


def world_size() -> int:
    """Return the number of ranks in the world; no look-up is counted, because it is equal on all ranks.

    Raises:
        NoCommunicatorError: there is no communicator.
    """
    communicator = _here.thread.communicator or _Everywhere.communicator
    return (communicator or current_communicator()).size


def get_rank() -> int:
    """Return the number of this rank in the world."""
    return current_communicator().rank


def world_ranks() -> tuple[int, ...]:
    """Return the ranks that make the same calls as this one: all ranks, or those of `among_ranks`.

    Collectives that no mesh names are calls of these ranks, such as the gather of a whole value.
    """
    world = _here.thread.world
    return tuple(range(current_communicator().size)) if world is None else world


@contextmanager
def among_ranks(ranks: Iterable[int]) -> Generator[None]:
    """Make `ranks` the world of this thread inside the block, while other ranks do something else.

    Enter it on exactly these ranks, for code whose tensors are all on them.
    """
    before = _here.thread.world
    _here.thread.world = tuple(sorted(ranks))
    try:
        yield
    finally:
        _here.thread.world = before


@contextmanager
def using_communicator(communicator: Communicator) -> Generator[Communicator]:
    """Use `communicator` as the calling thread's communicator inside the block."""
    before = _here.thread.communicator
    _here.thread.communicator = communicator
    try:
        yield communicator
    finally:
        _here.thread.communicator = before


@contextmanager
def using_in_all_threads(communicator: Communicator) -> Generator[Communicator]:
    """Use `communicator` inside the block, for all threads if the process has one communicator for all of them.

    So the threads of backward passes use it too.
    """
    if _here.thread.communicator is not None:
        with using_communicator(communicator):
            yield communicator
        return
    before = _Everywhere.communicator
    _Everywhere.communicator = communicator
    try:
        yield communicator
    finally:
        _Everywhere.communicator = before


def install_communicator(communicator: Communicator | None) -> None:
    """Set the communicator of the whole process; None removes it.

    Threads inside `using_communicator` keep their own.
    """
    _Everywhere.communicator = communicator
