"""Prediction of a rank's next call from its past calls.

A training step repeats the calls of an earlier step. `CallForecast` finds the latest place in the past at which the
last calls were made, and predicts the calls that followed. This is the search for repetitions of Ziv and Lempel (1977),
in constant time for each call: the last 32 calls are looked up, by a rolling hash, and then the last two.

Ranks with the same past predict the same call. So if two of them make different calls, at most one of them makes the
predicted one.
"""

from __future__ import annotations

_LONG = 32
"""Number of last calls that are looked up first: two do not tell places apart if every two occur twice in a step."""
_SURE = 16
"""Number of calls in a row that must have been predicted before a prediction counts."""
_MOST = 2**14
"""Number of calls after which the past is forgotten."""
_NOWHERE = -1
_MASK, _PRIME = (1 << 61) - 1, 1000003
_OLDEST = pow(_PRIME, _LONG, _MASK + 1)


class CallForecast:
    """The past calls of a sequence, as numbers, and the place from which the next one is predicted.

    >>> calls = CallForecast()
    >>> [calls.expects(call) for call in [1, 2, 3] * 10].index(True)
    21
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._past: list[int] = []
        self._hash = 0
        """Rolling hash of the last `_LONG` calls."""
        self._behind: dict[int, int] = {}
        """Hash of so many calls → the place behind their latest occurrence."""
        self._behind_two: dict[tuple[int, int], int] = {}
        self._place = _NOWHERE
        self._hits = 0

    def expects(self, call: int) -> bool:
        """Add a call to the past; True if it was predicted, and the calls before it were, too."""
        if len(self._past) >= _MOST:
            self._forget()
        past, place = self._past, self._place
        is_hit = 0 <= place < len(past) and past[place] == call
        two = (past[-1] if past else _NOWHERE, call)
        oldest = past[-_LONG] if len(past) >= _LONG else 0
        past.append(call)
        self._hash = (self._hash * _PRIME + call - oldest * _OLDEST) & _MASK
        if is_hit:
            self._hits += 1
            self._place = place + 1
        else:
            self._hits = 0
            self._place = self._behind.get(self._hash, self._behind_two.get(two, _NOWHERE))
        self._behind[self._hash] = self._behind_two[two] = len(past)
        return self._hits > _SURE
