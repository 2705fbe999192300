"""Communication between ranks: one interface for collectives and messages, and its implementations.

streams         streams of devices on which communication runs beside computation
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
    NoCommunicatorError,
    StragglerWarning,
)
from .checking.check_settings import Check
from .communicators.call import CommCall, Group
from .communicators.call_purpose import call_purpose, is_compared, is_noted, note_fact, when_compared
from .communicators.communicator import Communicator, FinishedConversion, PendingConversion, Receive
from .communicators.counters import Counters
from .communicators.current_communicator import (
    among_ranks,
    communicator_lookups,
    current_communicator,
    get_rank,
    install_communicator,
    installed_communicator,
    using_communicator,
    world_ranks,
    world_size,
)
from .communicators.delayed import DelayedCommunicator
from .communicators.peerless import PeerlessCommunicator
from .communicators.posted_exchanges import PostedCommunicator
from .communicators.reductions import reduce_terms
from .communicators.stragglers import Straggler
from .launcher.launch import launch
from .launcher.rank_console import KeptLines, first_rank_prints, prefix_prints
from .process.process_communicator import ProcessCommunicator, init_process, stragglers
from .simulation.shared_values import WATCHED_TYPES, WatchedType
from .simulation.simulated_ranks import SimulatedCommunicator, simulate
from .streams.device_graph import DeviceGraph, has_graphs
from .streams.stream_times import StreamWork

__all__ = [
    "WATCHED_TYPES",
    "CallError",
    "Check",
    "CommCall",
    "CommError",
    "Communicator",
    "Counters",
    "DeadPeerError",
    "DeadlockError",
    "DelayedCommunicator",
    "DeviceGraph",
    "DisagreementError",
    "FinishedConversion",
    "Group",
    "KeptLines",
    "LaunchError",
    "MissingCallError",
    "NestedSimulationError",
    "NoAnswerError",
    "NoCommunicatorError",
    "PeerlessCommunicator",
    "PendingConversion",
    "PostedCommunicator",
    "ProcessCommunicator",
    "Receive",
    "SimulatedCommunicator",
    "Straggler",
    "StragglerWarning",
    "StreamWork",
    "WatchedType",
    "among_ranks",
    "call_purpose",
    "communicator_lookups",
    "current_communicator",
    "first_rank_prints",
    "get_rank",
    "has_graphs",
    "init_process",
    "install_communicator",
    "installed_communicator",
    "is_compared",
    "is_noted",
    "launch",
    "note_fact",
    "prefix_prints",
    "reduce_terms",
    "simulate",
    "stragglers",
    "using_communicator",
    "when_compared",
    "world_ranks",
    "world_size",
]
