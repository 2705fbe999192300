"""Converted operands that autograd saves, kept up with writes to the tensors that they were made from.

`y = x @ w` with a sharded `w` gathers `w`, and autograd saves the gathered copy. On one device autograd saves `w`. If
`w` is written to before the backward pass, torch raises an error there. After a write to `w.data`, the backward pass
reads the new values. Both must hold for the copy. So each copy is noted here, and each backward pass looks at it first:

    `w` was written to           the version of the copy moves, so torch raises its own error if the copy was saved
    `w.data` was written to      the copy gets the new values, converted again
    `w` moved to other memory    the copy moves to the converted new values; saved views keep the old values

A copy that nothing saved is gone by then. Nothing is converted again unless somebody wrote to the data of a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ._convert import Move
from ._dist_tensor import plain_view
from ._writes import data_writes, is_anything_shared
from .torch_hooks import FakeTensor, backward_running, no_interception, shares_storage, unwritten

Conversion = Callable[[Tensor], Tensor]
"""A function that returns a copy of a local part."""


class _State(threading.local):
    def __init__(self) -> None:
        self.copies: dict[int, _Copy | _Alias] = {}
        self.count = 0
        self.is_noting = True


_state = _State()


class _Copy:
    """A converted operand, its source, and how often both had been written to.

    `exact` is False for an operand of another algorithm than one device runs, which may save other tensors.
    """

    __slots__ = ("before", "copy", "counted", "data", "exact", "geometry", "how", "source", "storage", "version")

    def __init__(self, copy: ref[Tensor], source: Tensor, how: Conversion, before: int, exact: bool) -> None:
        """Note a copy. Raises RuntimeError for a source without a storage or without a version counter."""
        storage: Any = source.untyped_storage()
        base = source._base  # has the version counter, and is alive when a view such as `w.t()` is gone
        self.copy, self.how, self.before, self.exact = copy, how, before, exact
        self.source, self.storage = ref(source), ref(storage)
        self.geometry = source.storage_offset(), source.size(), source.stride()
        self.counted = self.source if base is None else ref(base)
        self.version = source._version
        self.data = data_writes(storage) if is_anything_shared() else 0

    def keep_up(self) -> bool:
        """Bring the copy up to the source; False if it needs no more looks."""
        copy, counted = self.copy(), self.counted()
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
        if source is not None and source.untyped_storage() is not storage:
            self.__init__(self.copy, source, self.how, self.before, self.exact)
            copy.data = plain_view(self.how(source.detach()))
        elif storage is not None and data_writes(storage) != self.data:
            self.data = data_writes(storage)
            now = torch.empty(0, dtype=copy.dtype, device=copy.device).set_(storage, *self.geometry)
            with unwritten(copy):
                copy.copy_(self.how(now))


class _Alias:
    """A tensor with the memory of its source, which moves along with the source."""

    __slots__ = ("alias", "source")

    def __init__(self, alias: ref[Tensor], source: Tensor) -> None:
        self.alias, self.source = alias, ref(source)

    def keep_up(self) -> bool:
        """Bring the alias to the memory of the source; False if it needs no more looks."""
        alias, source = self.alias(), self.source()
        if alias is None or source is None:
            return False
        if is_anything_shared() and not shares_storage(alias, source):
            alias.data = plain_view(source.detach())
        return True


def note_alias(alias: Tensor, source: Tensor) -> Tensor:
    """Return `alias`, which shares the memory of `source`, after noting it; call it with interception off."""
    if not isinstance(alias, FakeTensor):
        copies, key = _state.copies, _state.count
        _state.count += 1
        copies[key] = _Alias(ref(alias, lambda _: copies.pop(key, None)), source)
    return alias


def note_copy(copy: Tensor, source: Tensor, how: Conversion, exact: bool = True) -> None:
    """Note `copy`, which is `how(source)` and may be saved by autograd; call it with interception off."""
    state = _state
    if copy is source or not state.is_noting or isinstance(copy, FakeTensor):
        return
    copies, key = state.copies, state.count
    state.count = key + 1
    try:
        note = _Copy(ref(copy, lambda _: copies.pop(key, None)), source, how, copy._version, exact)
    except RuntimeError:  # a sparse tensor, or a tensor of inference mode; asking first costs 0.4 µs in each call
        return
    copies[key] = note


@contextmanager
def unnoted() -> Generator[None]:
    """Note no copies inside the context: for operators whose backward pass reads no operand."""
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
    """Bring every noted copy up to its source, before a backward pass reads it; every rank makes the call."""
    copies = _state.copies
    if not copies or backward_running() != -1:
        return
    with no_interception(), torch.no_grad():
        for key, copy in list(copies.items()):
            if not copy.keep_up():
                copies.pop(key, None)
