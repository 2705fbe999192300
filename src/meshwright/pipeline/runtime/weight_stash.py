"""The versions of the weights that a rank holds in an asynchronous schedule, whose updates overwrite the newest one.

The row gives the later uses of an older version. Before an update, the values that share the memory it writes to are
copied; all other values are shared.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from meshwright.graph import Value

Known = dict[Value, Any]


class WeightStash:
    """The versions for the entries of a row: entry n uses version `used[n]`, and `read` are the values with versions.

    >>> versions = WeightStash([0, 0, 1, 0, 1], read=())
    >>> versions.keep(2, {}, []), [*versions.older], versions.drop(3), [*versions.older]
    (None, [0], None, [])
    """

    def __init__(self, used: Sequence[int], read: Collection[Value]) -> None:
        self._used, self._read = used, read
        self._last = {version: n for n, version in enumerate(used)}
        self.older: dict[int, Known] = {}

    def values_for(self, n: int, base: Known) -> Mapping[Value, Any]:
        """Return the values that entry n reads: `base`, with the values of an older version where it uses one."""
        older = self.older.get(self._used[n])
        return base if older is None else ChainMap(older, base)

    def keep(self, n: int, base: Known, written: Collection[Tensor], *held: Known) -> None:
        """Save the newest version, if later entries use it, before the update that is entry n and writes to `written`.

        Values `held` for microbatches that share that memory are copied as well.
        """
        newest = self._used[n] - 1
        if self._last.get(newest, -1) <= n:
            return
        memory = {x.untyped_storage().data_ptr() for x in written}
        self.older[newest] = {v: _copied_if_shared(base[v], memory) for v in self._read if v in base}
        for known in held:
            known.update({v: _copied_if_shared(x, memory) for v, x in known.items()})

    def drop(self, n: int) -> None:
        """Free the version of entry n, if no later entry uses it."""
        if self._last[self._used[n]] == n:
            self.older.pop(self._used[n], None)


def _copied_if_shared(x: object, memory: Collection[int]) -> object:
    """Return a copy of a tensor that shares this memory; other values as they are."""
    if isinstance(x, Tensor) and x.numel() and x.untyped_storage().data_ptr() in memory:
        return x.clone()
    return x
