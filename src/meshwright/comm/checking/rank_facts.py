"""The differences between two ranks that made the same call for different values."""

from __future__ import annotations

import json
from datetime import timedelta

from meshwright.layout import InputError, read_json

from ..communicators.call_purpose import facts
from ..torch_hooks import Store

_LIMIT = timedelta(seconds=3)
_SHOWN, _LONGEST = 8, 60
_MOST_BYTES = 2**22
_NOTHING = "nothing"


class RankFacts:
    """The facts of this rank, published for its peers, and the facts of the peers."""

    def __init__(self, rank: int, store: Store) -> None:
        self.rank, self.store = rank, store

    def tell(self, call: str) -> None:
        """Publish the facts of this rank for the peers of a call."""
        self.store.set(f"facts/{call}/{self.rank}", json.dumps(facts))

    def differences(self, call: str, peer: int) -> str:
        """Return the facts that differ between this rank and `peer`, which publishes its own; "" if there are none."""
        try:
            key = f"facts/{call}/{peer}"
            self.store.wait([key], _LIMIT)
            read = read_json(self.store.get(key), _MOST_BYTES)
        except (RuntimeError, InputError):  # the peer is gone, or compares with another rank
            return ""
        theirs = {str(name): str(value) for name, value in read.items()} if isinstance(read, dict) else {}
        (low, a), (high, b) = sorted([(self.rank, facts), (peer, theirs)], key=lambda side: side[0])
        rows = [
            f"{name} is {_short(a, name)} on rank {low} and {_short(b, name)} on rank {high}"
            for name in {**a, **b}
            if a.get(name) != b.get(name)
        ]
        more = f", and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        return "; ".join(rows[:_SHOWN]) + more


def _short(told: dict[str, str], name: str) -> str:
    value = told.get(name, _NOTHING)
    return value if len(value) <= _LONGEST else value[: _LONGEST - 3] + "..."
