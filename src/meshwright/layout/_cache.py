"""Dict of bounded size, for caches."""

from __future__ import annotations

from itertools import islice
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """A dict of at most `most` entries. When it is full, the oldest quarter is removed.

    Lookups are those of a dict. Entries may be added by `cache[key] = value` and by `setdefault` only.

    >>> squares = Cache[int, int](4)
    >>> for n in range(6):
    ...     squares[n] = n * n
    >>> squares
    {2: 4, 3: 9, 4: 16, 5: 25}
    """

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        self._make_room(key)
        super().__setitem__(key, value)

    def setdefault(self, key: K, default: V) -> V:  # pyright: ignore[reportIncompatibleMethodOverride] - no None here
        self._make_room(key)
        return super().setdefault(key, default)

    def _make_room(self, key: K) -> None:
        if len(self) >= self.most and key not in self:
            for old in list(islice(self, max(1, self.most // 4))):
                self.pop(old, None)
