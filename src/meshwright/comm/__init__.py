"""Communication between ranks: one interface for collectives and messages, and its implementations.

communicators   the interface, and communicators that need no processes
simulation      simulation of all ranks in one process, one thread per rank
launcher        start, addresses, secret and state of the processes of a run
transport       connections, messages and shared memory between processes
checking        comparison of calls before data moves, and errors for peers that cannot come
process         the communicator with one process per rank
"""

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
from .checking.call_guard import Check
from .communicators.call import Call, Group
from .communicators.call_purpose import identity, is_compared, note_fact, when_compared
from .communicators.communicator import Arrival, Arrived, Carrier, Receive
from .communicators.counters import Counters
from .communicators.current_communicator import current, install, installed, reads_of_rank, use
from .communicators.delayed import Delayed
from .communicators.posted_exchanges import Posted
from .communicators.recorded import Recorded
from .communicators.reductions import reduce as joined
from .communicators.stragglers import Straggler
from .launcher.launch import launch
from .launcher.rank_console import Kept, first_rank_prints, prefix_prints
from .process.process_communicator import ProcessCarrier, init_process, stragglers
from .simulation.shared_values import WATCHES, Watch
from .simulation.simulated_ranks import Simulated, simulate

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
