"""Communication between ranks: one interface for collectives and messages, and the communicators that implement it."""

from ._call import Call, Group
from ._carrier import Arrival, Arrived, Carrier, Receive
from ._counters import Counters
from ._current import current, install, installed, reads_of_rank, use
from ._delayed import Delayed
from ._errors import (
    CallError,
    CommError,
    DeadlockError,
    DeadPeerError,
    DisagreementError,
    LaunchError,
    MissingCallError,
    NestedSimulationError,
    NoAnswerError,
    NoCarrierError,
    StragglerWarning,
)
from ._guard import Check
from ._identity import identity, is_compared, note_fact, when_compared
from ._launch import launch
from ._looking import Kept, first_rank_prints, prefix_prints
from ._posted import Posted
from ._process import ProcessCarrier, init_process, stragglers
from ._recorded import Recorded
from ._reduce import reduce as joined
from ._shared_values import WATCHES, Watch
from ._simulated import Simulated, simulate
from ._stragglers import Straggler

__all__ = [
    "WATCHES",
    "Arrival",
    "Arrived",
    "Call",
    "CallError",
    "Carrier",
    "Check",
    "CommError",
    "Counters",
    "DeadPeerError",
    "DeadlockError",
    "Delayed",
    "DisagreementError",
    "Group",
    "Kept",
    "LaunchError",
    "MissingCallError",
    "NestedSimulationError",
    "NoAnswerError",
    "NoCarrierError",
    "Posted",
    "ProcessCarrier",
    "Receive",
    "Recorded",
    "Simulated",
    "Straggler",
    "StragglerWarning",
    "Watch",
    "current",
    "first_rank_prints",
    "identity",
    "init_process",
    "install",
    "installed",
    "is_compared",
    "joined",
    "launch",
    "note_fact",
    "prefix_prints",
    "reads_of_rank",
    "simulate",
    "stragglers",
    "use",
    "when_compared",
]
