"""Connections, messages and shared memory between the processes of a run.

shared_region       memory that processes of one host share, and waits for values in it
ring_buffer         byte streams between two processes through shared memory
listener            the port of a rank, which accepts connections of ranks of the run only
rank_state          RankState: the current call of a rank and the ranks that it waits for
control_links       ControlLinks: connections for frames of calls and for questions about a rank's state
messages            Messages: messages between processes, buffered at the receiver
shared_memory       SharedMemoryTransport: collectives of the processes of one host through shared memory
direct_exchange     DirectExchange: collectives of small tensors over Gloo by one message to each rank
host_transport      HostTransport: collectives of tensors on devices through the memory of the host
background_thread   BackgroundThread: one thread that runs the work begun by the rank, in order
"""
