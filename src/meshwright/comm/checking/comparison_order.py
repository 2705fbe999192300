"""Choice of the calls that are compared behind their transfer, so that no round trip is added to it.

A transfer that blocks the process ends once all ranks have entered the call, and they send their frames before that.
So the frames are there behind it. But ranks that enter a transfer with different calls may wait forever, or end. A call
is therefore compared behind its transfer only if it was predicted from the past of its group (`call_forecast.py`). All
members have the same past, so of two ranks with different calls one compares first. That rank raises the error and
never enters the transfer. The other one learns of it when the transfer fails, or from the watchdog.

Ranks that share several groups could mix up the groups. So the call must also be predicted from all calls of this rank.
"""

from __future__ import annotations

from ..communicators.call import CommCall, Group, is_pairwise
from ..transport.control_links import ControlLinks
from .call_forecast import CallForecast

_MEASURED = 16
"""Number of calls of a kind that are compared first once a transfer has taken long, to measure the waits for peers."""
_FACTOR, _LONGER = 1.5, 1e-3
"""A transfer is long if it takes more than this multiple of the quickest one of its kind, and these seconds more."""
_MOST_KINDS = 8192


class ComparisonOrder:
    """The past calls of a rank, and the times of their transfers."""

    def __init__(self, links: ControlLinks) -> None:
        self._links = links
        self._own = CallForecast()
        self._of_groups: dict[Group, CallForecast] = {}
        self._quickest: dict[int, float] = {}
        self._measured: dict[int, int] = {}

    def is_behind(self, call: CommCall, kind: int) -> bool:
        """Add a call to the past; True if it may be compared behind its transfer.

        `kind` is a hash of the part of the call that all ranks of the group have in common.
        """
        group = self._of_groups.get(call.group)
        if group is None:
            group = self._of_groups[call.group] = CallForecast()
        in_group, in_all = group.expects(kind), self._own.expects(hash((call.group, kind)))
        if not (in_group and in_all) or is_pairwise(call) or self._is_measured(kind):
            return False
        return any(self._links.needs_round_trip(peer) for peer in call.group if peer != self._links.rank)

    def note(self, kind: int, seconds: float) -> None:
        """Store the time of a transfer that was compared behind it. It includes the waits for late peers."""
        if len(self._quickest) >= _MOST_KINDS:
            self._quickest.clear()
        quickest = self._quickest[kind] = min(seconds, self._quickest.get(kind, seconds))
        if seconds > _FACTOR * quickest + _LONGER:
            self._measured[kind] = _MEASURED

    def _is_measured(self, kind: int) -> bool:
        """True if the waits for peers before this call are measured."""
        left = self._measured.get(kind)
        if left is None:
            return False
        if left > 1:
            self._measured[kind] = left - 1
        else:
            del self._measured[kind]
        return True
