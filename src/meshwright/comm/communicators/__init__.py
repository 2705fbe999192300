"""The interface of all communicators, and the communicators that need no processes.

call                   CommCall: one rank's side of a collective or message, and its comparison with a peer's
reductions             the reductions, and the dtypes that each one accepts
argument_checks        checks of the arguments of collectives
counters               Counters: exact numbers of calls and bytes of a rank
call_purpose           numbers of the purposes of calls, which ranks that run one program have in common
stragglers             Straggler: a slow rank, detected from the waits of other ranks
communicator           Communicator: the interface of all communicators, with shared checks and counters
current_communicator   the communicator of the calling thread, otherwise that of the process
queued_communicator    QueuedCommunicator: collectives that are queued on streams of a device
peerless               PeerlessCommunicator: a communicator without peers, with correct shapes and exact counts
delayed                DelayedCommunicator: a simulated slow network around another communicator
posted_exchanges       PostedCommunicator: exchanges as messages that are sent without waiting
"""
