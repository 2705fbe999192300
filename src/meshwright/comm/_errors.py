"""What can go wrong between ranks, one class per cause.

CommError
├── CallError               a call that no rank could make: an unknown reduction, a group without the caller
├── NoCarrierError          a collective outside any ranks
├── NestedSimulationError   simulate inside a simulated rank
├── DisagreementError       two ranks meet with different calls
├── DeadlockError           every rank waits for another
├── MissingCallError        a rank ended, or went elsewhere, while others wait for it
├── DeadPeerError           a rank's process is gone
└── LaunchError             local ranks that could not be started
"""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class CommError(MeshwrightError, RuntimeError):
    """Root of what can go wrong between ranks."""


class CallError(CommError, ValueError):
    """A call that no rank could make: an unknown reduction, pieces that do not fit, a group without the caller."""


class NoCarrierError(CommError):
    """A collective outside any ranks: neither simulated nor started as processes."""


class NestedSimulationError(CommError):
    """`simulate` inside a simulated rank."""


class DisagreementError(CommError):
    """Two ranks meet with different calls."""


class DeadlockError(CommError):
    """Every rank waits for another rank."""


class MissingCallError(CommError):
    """A rank ended, or went elsewhere, while other ranks wait for its call."""


class DeadPeerError(CommError):
    """A rank's process is gone."""


class LaunchError(CommError):
    """Local ranks that could not be started."""


def disagreement(rank: int, call: str, peer: int, other: str, why: str) -> DisagreementError:
    """The error that names both ranks and both calls."""
    (low, first), (high, second) = sorted([(rank, call), (peer, other)])
    return DisagreementError(
        f"one collective of ranks {low} and {high}",
        f"rank {low} calls {first}; rank {high} calls {second}",
        why,
        "the same call on every rank of the group, in the same order",
    )
