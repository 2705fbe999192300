"""Choice of the calls that are compared behind their transfer, so that no round trip is added to it.

A transfer that blocks the process ends once all ranks have entered the call, and they send their frames before that.
So the frames are there behind it. But ranks that enter a transfer with different calls may wait forever, or end. A call
is therefore compared behind its transfer only if it was predicted from the past of its group (`call_forecast.py`). All
members have the same past, so of two ranks with different calls one compares first. That rank raises the error and
never enters the transfer. The other one learns of it when the transfer fails, or from the watchdog.

Ranks that share several groups could mix up the groups. So the call must also be predicted from all calls of this rank.
"""

from __future__ import annotations

from enum import Enum, auto

from ..communicators.call import CommCall, Group, is_pairwise
from ..transport.control_links import ControlLinks
from .call_forecast import CallForecast


class Order(Enum):
    """Order of the comparison and the transfer of a call."""

    FIRST = auto()
    """The comparison is first."""
    FIRST_HERE = auto()
    """The comparison is first on this rank; other ranks of the group may compare behind the transfer."""
    BEHIND = auto()
    """The comparison is behind the transfer."""


class ComparisonOrder:
    """The past calls of a rank, from which the order of its next call follows."""

    def __init__(self, links: ControlLinks) -> None:
        self._links = links
        self._own = CallForecast()
        self._of_groups: dict[Group, CallForecast] = {}

    def of_call(self, call: CommCall, kind: int) -> Order:
        """Add a call to the past, and return its order.

        `kind` is a hash of the part of the call that all ranks of the group have in common.
        """
        if self._is_in_memory(call.group):
            return Order.FIRST
        group = self._of_groups.get(call.group)
        if group is None:
            group = self._of_groups[call.group] = CallForecast()
        in_group, in_all = group.expects(kind), self._own.expects(hash((call.group, kind)))
        if not in_group or is_pairwise(call) or not self._needs_round_trip(call.group):
            return Order.FIRST
        return Order.BEHIND if in_all else Order.FIRST_HERE

    def forget(self, group: Group) -> None:
        """Forget the past of a group whose ranks have made different calls, because their pasts differ."""
        self._of_groups.pop(group, None)

    def _is_in_memory(self, group: Group) -> bool:
        """True if every link of this rank, and thus of the group, has shared memory: then no past is needed.

        A rank without any other link never compares behind a transfer. The past of a group begins with its first call,
        since the links of the group are not open then.
        """
        return not self._links.has_wire and self._links.open_to(group) is not None

    def _needs_round_trip(self, group: Group) -> bool:
        return any(self._links.needs_round_trip(peer) for peer in group if peer != self._links.rank)
