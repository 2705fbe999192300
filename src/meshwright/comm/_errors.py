"""Errors of communication between ranks, one class per cause.

CommError
├── CallError               a call that no rank can make: an unknown reduction, calls of two threads at once
├── NoCommunicatorError     a collective without ranks
├── NestedSimulationError   simulate inside a simulated rank
├── DisagreementError       two ranks make different calls where both must make the same one
├── DeadlockError           every rank waits for another
├── MissingCallError        a rank ended, or made another call, while others wait for it
├── DeadPeerError           the process of a rank has ended
├── NoAnswerError           the process of a rank exists, but is stopped or its host does not respond
└── LaunchError             local ranks that could not be started

StragglerWarning            ranks wait for a slower one
"""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class CommError(MeshwrightError, RuntimeError):
    """Base class of errors between ranks."""

    def add_fix(self, text: str) -> None:
        """Append `text` to the fix."""
        self.write = f"{self.write}; {text}"
        self.args = (self.asked, self.found, self.why, self.write)


class CallError(CommError, ValueError):
    """A call that no rank can make: an unknown reduction, mismatched pieces, or two threads at once."""


class NoCommunicatorError(CommError):
    """A collective without ranks: none are simulated or started as processes."""


class NestedSimulationError(CommError):
    """`simulate` inside a simulated rank."""


class DisagreementError(CommError):
    """Two ranks make different calls where both must make the same one."""


class DeadlockError(CommError):
    """Every rank waits for another rank."""


class MissingCallError(CommError):
    """A rank ended, or made another call, while other ranks wait for its call."""


class DeadPeerError(CommError):
    """The process of a rank has ended."""


class NoAnswerError(CommError):
    """The process of a rank exists but cannot make a call: it is stopped, or its host does not respond."""


class LaunchError(CommError):
    """Local ranks that could not be started."""


class StragglerWarning(RuntimeWarning):
    """Ranks wait for a slower rank."""


_COLLECTIVES = (
    "a collective needs the call of every rank in its group",
    "make the same collectives in the same order on every rank, whatever the rank's number or data",
)
_MESSAGES = (
    "a message needs a send on one rank and a receive on the other",
    "write a receive for every send and a send for every receive, with the same tag",
)


def missing_call_error(asked: str, found: str, message: bool) -> MissingCallError:
    """Return the error for a call that will not come: the other side of a message, or a rank's part in a collective."""
    return MissingCallError(asked, found, *(_MESSAGES if message else _COLLECTIVES))


def wrong_message_error(rank: int, call: str, peer: int, sent: str) -> DisagreementError:
    """Return the error for a message that differs from the one its receiver expects."""
    return DisagreementError(
        f"one message from rank {peer} to rank {rank}",
        f"rank {peer} calls {sent}; rank {rank} calls {call}",
        "the sent shape or dtype differs from the expected one",
        "use the same shape and dtype on both ranks, and a different tag for each message in flight",
    )


def disagreement_error(rank: int, call: str, peer: int, other: str, why: str) -> DisagreementError:
    """Return the error that names both ranks and both calls."""
    (low, first), (high, second) = sorted([(rank, call), (peer, other)])
    return DisagreementError(
        f"one collective of ranks {low} and {high}",
        f"rank {low} calls {first}; rank {high} calls {second}",
        why,
        "make the same calls on every rank of the group, in the same order",
    )
