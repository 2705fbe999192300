"""Simulation of all ranks in one process: one thread per rank, one of which runs at a time.

simulated_ranks   simulate: run a function on all ranks; SimulatedCommunicator: the communicator of one of them
rank_globals      globals and class attributes of the program, separate for each simulated rank
shared_values     values in shared containers, hidden from the ranks that did not make them
forward_mode      one level of forward-mode derivatives that all simulated ranks share
profiler_guard    error if a second simulated rank starts torch's profiler
"""
