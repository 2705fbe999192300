"""Converted operands that autograd saves, kept up to date with writes to the tensors that they were made from.

`y = x @ w` with a sharded `w` gathers `w`, and autograd saves the gathered copy. On one device autograd saves `w`. If
`w` is written to before the backward pass, torch raises an error there. After a write to `w.data`, the backward pass
reads the new values. Both must hold for the copy. So each copy is noted here, and each backward pass checks it first:

    `w` was written to           the version of the copy moves, so torch raises its own error if the copy was saved
    `w.data` was written to      the copy gets the new values, converted again
    `w` moved to other memory    the copy moves to the converted new values; saved views keep the old values

A copy that nothing saved no longer exists then. Nothing is converted again unless the data of a tensor was written to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from weakref import getweakrefs, ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..core.dist_tensor import local_shape, plain_view
from ..core.write_counts import is_anything_shared, other_writes
from ..torch_hooks import FakeTensor, backward_running, no_interception, shares_storage, unwritten
from .convert import Move

Conversion = Callable[[Tensor], Tensor]
"""A function that returns a copy of a local part."""

_STORAGE, _OFFSET, _STRIDE = Tensor.untyped_storage, Tensor.storage_offset, Tensor.stride
"""Methods of the local part; those of a distributed tensor would be dispatched first."""


class _State(threading.local):
    def __init__(self) -> None:
        self.notes: dict[int, _Copy | _Alias] = {}
        self.is_noting = True


_state = _State()


class _Note(ref[Tensor]):
    """A weak reference to a noted tensor.

    When the tensor is freed, the note is removed from the notes of its thread.
    """

    __slots__ = ("notes", "source")
    notes: dict[int, _Copy | _Alias]
    source: ref[Tensor]


def _drop(note: _Note) -> None:
    note.notes.pop(id(note), None)


class _Copy(_Note):
    """A converted operand, its source, and the numbers of writes to both.

    `exact` is False for an operand of another algorithm than one device runs, which may save other tensors. `follows`
    is False for a copy of a view, which stays a view of the old memory when the source moves to other memory.
    """

    __slots__ = ("before", "counted", "exact", "follows", "geometry", "how", "others", "storage", "version")
    before: int
    exact: bool
    follows: bool
    how: Conversion

    def look(self, source: Tensor) -> None:
        """Store the state of the source. Raises RuntimeError if it has no storage or no version counter."""
        storage = _STORAGE(source)
        base = source._base  # has the version counter, and is alive when a view such as `w.t()` is gone
        self.source = found = ref(source)
        self.storage = ref(storage)
        self.geometry = _OFFSET(source), local_shape(source), _STRIDE(source)
        self.counted = found if base is None else ref(base)
        self.version = source._version
        self.others = other_writes(storage, self.version) if is_anything_shared() else 0

    def keep_up(self) -> bool:
        """Update the copy from the source; False if it needs no more checks."""
        copy, counted = self(), self.counted()
        if copy is None or copy._version != self.before:  # written to itself, as a view, which torch notices
            return False
        if counted is not None and counted._version != self.version:
            if self.exact:
                increment_version(copy)
            return False
        if is_anything_shared():
            self._convert_again(copy)
        return True

    def _convert_again(self, copy: Tensor) -> None:
        source, storage = self.source(), self.storage()
        if self.follows and source is not None and source.untyped_storage() is not storage:
            self.look(source)
            with torch.no_grad():
                copy.data = plain_view(self.how(source.detach()))
        elif storage is not None and other_writes(storage, self.version) != self.others:
            self.others = other_writes(storage, self.version)
            now = torch.empty(0, dtype=copy.dtype, device=copy.device).set_(storage, *self.geometry)
            with unwritten(copy), torch.no_grad():
                copy.copy_(self.how(now))


class _Alias(_Note):
    """A tensor with the memory of its source, which moves along with the source."""

    __slots__ = ()

    def keep_up(self) -> bool:
        """Move the alias to the memory of the source; False if it needs no more checks."""
        alias, source = self(), self.source()
        if alias is None or source is None:
            return False
        if is_anything_shared() and not shares_storage(alias, source):
            alias.data = plain_view(source.detach())
        return True


def _add(note: _Copy | _Alias) -> None:
    notes = _state.notes
    note.notes = notes
    notes[id(note)] = note


def note_alias(alias: Tensor, source: Tensor) -> Tensor:
    """Return `alias`, which shares the memory of `source`, after noting it; call it with interception off."""
    if not isinstance(alias, FakeTensor):
        note = _Alias(alias, _drop)
        note.source = ref(source)
        _add(note)
    return alias


def note_copy(copy: Tensor, source: Tensor, how: Conversion, exact: bool = True, follows: bool = True) -> None:
    """Note `copy`, which is `how(source)` and may be saved by autograd; call it with interception off."""
    if copy is source or not _state.is_noting or isinstance(copy, FakeTensor):
        return
    note = _Copy(copy, _drop)
    note.how, note.exact, note.follows = how, exact, follows
    try:
        note.before = copy._version
        note.look(source)
    except RuntimeError:  # a sparse tensor, or one of inference mode; a check before costs 0.4 µs in each call
        return
    _add(note)


def drop_notes(copy: Tensor) -> None:
    """Remove the notes of `copy`, which now has other values or other memory."""
    for note in getweakrefs(copy):
        if isinstance(note, _Copy):
            _drop(note)


def note_reading(copy: Tensor, source: Tensor, how: Conversion) -> None:
    """Note `copy`, which was just written to and is `how(source)` now; call it with interception off."""
    drop_notes(copy)
    note_copy(copy, source, how, follows=False)


def note_again(copy: Tensor, view: Tensor, then: Conversion) -> None:
    """Note `copy`, which is `then(view)`, where `view` is a view of a noted copy; call it with interception off."""
    base = view if view._base is None else view._base
    for note in getweakrefs(base):
        if isinstance(note, _Copy):
            again = _Copy(copy, _drop)
            for name in ("counted", "exact", "geometry", "others", "source", "storage", "version"):
                setattr(again, name, getattr(note, name))
            again.how = _conversion_of_view(note.how, base, view, then)
            again.before, again.follows = copy._version, False
            _add(again)


def _conversion_of_view(how: Conversion, base: Tensor, view: Tensor, then: Conversion) -> Conversion:
    """Return a function that computes `then(view)` from a source.

    `how(source)` is `base`, and `view` is in its memory.
    """
    like, offset = (local_shape(base), _STRIDE(base)), _OFFSET(view) - _OFFSET(base)
    shape, stride = local_shape(view), _STRIDE(view)

    def converted(part: Tensor) -> Tensor:
        new = how(part)
        memory = torch.empty_strided(*like, dtype=new.dtype, device=new.device).copy_(new)
        return then(memory.as_strided(shape, stride, offset))

    return converted


@contextmanager
def unnoted() -> Generator[None]:
    """Note no copies inside the context, for operators whose backward pass reads no operand."""
    _state.is_noting, before = False, _state.is_noting
    try:
        yield
    finally:
        _state.is_noting = before


def note_move(copy: Tensor, source: Tensor, how: Move, exact: bool = True) -> Tensor:
    """Return `copy`, which is `how(source)`, after noting it if a gradient may be computed from it."""
    if how.is_noted and torch.is_grad_enabled():
        note_copy(copy, source, how, exact)
    return copy


def keep_up() -> None:
    """Update every noted copy from its source, before a backward pass reads it; every rank makes the call."""
    notes = _state.notes
    if not notes or backward_running() != -1:
        return
    with no_interception():
        for key, note in list(notes.items()):
            if not note.keep_up():
                notes.pop(key, None)
