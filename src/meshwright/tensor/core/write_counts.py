"""Count of the writes to a memory, including those that no version counter of the tensor shows.

A write to `x` or to a view of `x` changes the version counter of `x`. A write to `x.data` changes another counter,
although the memory is the same. So the storage keeps a probe for each counter of its memory: a tensor that shares the
counter and has no memory. The number of writes to a memory is the sum over its probes.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor

from ..torch_hooks import FakeTensor, no_interception

_KEY = "_meshwright_counters"
_LIFE = "_meshwright_life"
_LIMIT = 32
"""Probes that a storage keeps: a program that takes `x.data` in each step would fill the memory with probes."""

_version: Callable[[Tensor], int] = getattr(Tensor._version, "__get__")  # noqa: B009 - stubs: an int


class _Life:
    """An object with the lifetime of its tensor; `torch.utils.swap_tensors` allows no other references."""

    __slots__ = ("__weakref__",)


def _life_of(x: Tensor) -> ref[_Life]:
    return ref(vars(x).setdefault(_LIFE, _Life()))


class _Counters:
    """The counters of one memory: the first one and those of other tensors.

    `dropped` corrects the sum: it counts the writes of dropped counters, and excludes writes to other memory.
    """

    def __init__(self, first: Tensor) -> None:
        self.first, self.dropped = counter_of(first), 0
        self.others: list[tuple[ref[_Life], Tensor]] = []

    def add(self, x: Tensor) -> None:
        if len(self.others) >= _LIMIT:
            self._drop()
        probe = counter_of(x)
        self.dropped -= probe._version  # writes before `x` got this memory
        self.others.append((_life_of(x), probe))

    def _drop(self) -> None:
        """Keep the counters of living tensors, and the last ones of the others: a view may still move those."""
        half = len(self.others) // 2
        for life, probe in self.others[:half]:
            self.dropped += 0 if life() is not None else probe._version
        self.others = [pair for pair in self.others[:half] if pair[0]() is not None] + self.others[half:]

    def total(self) -> int:
        return self.first._version + self.dropped + sum(probe._version for _, probe in self.others)


def counter_of(x: Tensor) -> Tensor:
    """Return a tensor that shares the version counter of `x`, but not the memory."""
    probe = x.detach()
    probe.data = torch.empty(0, dtype=x.dtype, device=x.device)
    return probe


def version_of(x: Tensor) -> int:
    """Return the version counter of `x`: the number of writes to `x` and its views, without writes to `x.data`."""
    with no_interception():
        return 0 if x.is_inference() else _version(x)


def writes_to(x: Tensor) -> int:
    """Return the number of writes to the memory of `x`, including `x.data`; 0 for a tensor of inference mode."""
    with no_interception():
        if x.is_inference():
            return 0
        counters: _Counters | None = x.untyped_storage().__dict__.get(_KEY)
        return _version(x) if counters is None else counters.total()


Mark = tuple[object, int, int]
"""Identity of a memory, address in it, and the number of writes to it: equal marks mean equal values."""

_MEMORY = "_meshwright_memory"
"""Attribute of a storage with an object that is its identity. An address is no identity: freed memory is used again."""


class _Memory:
    """The identity of a memory."""

    __slots__ = ()


def mark_of(x: Tensor) -> Mark:
    """Return the mark of this rank's part of `x`. A write changes the mark, and so does `x.data = y`."""
    with no_interception():
        memory: object = x.untyped_storage().__dict__.setdefault(_MEMORY, _Memory())
        address = 0 if isinstance(x, FakeTensor) else x.data_ptr()
        return memory, address, writes_to(x)


class _Shared:
    """A switch: `ever` is True once a memory of this process has two counters."""

    ever = False


def is_anything_shared() -> bool:
    """True if some tensor of this process shares memory with another one and has its own counter, as `x.data` does."""
    return _Shared.ever


def other_writes(storage: torch.UntypedStorage, version: int) -> int:
    """Return the number of writes to a storage beside the `version` that one of its counters shows."""
    counters: _Counters | None = storage.__dict__.get(_KEY)
    return 0 if counters is None else counters.total() - version


def note_counter(x: Tensor, other: Tensor) -> None:
    """Record that `other` has the memory of `x` and its own version counter; call it with interception off."""
    if x.is_inference() or other.is_inference() or isinstance(x, FakeTensor):
        return
    held = x.untyped_storage().__dict__
    if _KEY not in held:
        held[_KEY] = _Counters(x)
    note_sharing(other)


def note_sharing(x: Tensor) -> None:
    """Record that `x` has its own version counter, for any memory; call it with interception off."""
    held = x.untyped_storage().__dict__
    if _KEY in held:
        held[_KEY].add(x)
        _Shared.ever = True
    else:
        held[_KEY] = _Counters(x)
