"""The versions of the weights that a rank holds while they change: an update writes over the newest one.

What older ones are still to be used for is known from the row. Those are copies, made in front of the update, of what
looks at the memory that it writes to; everything else is shared.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from meshwright.graph import Value

Known = dict[Value, Any]


class Versions:
    """The versions for the entries of a row: entry n uses version `used[n]`, and those `read` from a version.

    >>> versions = Versions([0, 0, 1, 0, 1], read=())
    >>> versions.keep(2, {}, []), [*versions.older], versions.drop(3), [*versions.older]
    (None, [0], None, [])
    """

    def __init__(self, used: Sequence[int], read: Collection[Value]) -> None:
        self._used, self._read = used, read
        self._last = {version: n for n, version in enumerate(used)}
        self.older: dict[int, Known] = {}

    def of(self, n: int, base: Known) -> Mapping[Value, Any]:
        """What entry n reads: `base`, but for what it reads of an older version."""
        older = self.older.get(self._used[n])
        return base if older is None else ChainMap(older, base)

    def keep(self, n: int, base: Known, written: Collection[Tensor], *held: Known) -> None:
        """In front of the update that is entry n, which writes to `written`: the newest version, where it is needed.

        What is `held` of microbatches and looks at that memory is copied as well.
        """
        newest = self._used[n] - 1
        if self._last.get(newest, -1) <= n:
            return
        memory = {x.untyped_storage().data_ptr() for x in written}
        self.older[newest] = {v: _apart(base[v], memory) for v in self._read if v in base}
        for known in held:
            known.update({v: _apart(x, memory) for v, x in known.items()})

    def drop(self, n: int) -> None:
        """Behind entry n, what nothing uses any more."""
        if self._last[self._used[n]] == n:
            self.older.pop(self._used[n], None)


def _apart(x: Any, memory: Collection[int]) -> Any:
    looks = isinstance(x, Tensor) and x.numel() and x.untyped_storage().data_ptr() in memory
    return x.clone() if looks else x
