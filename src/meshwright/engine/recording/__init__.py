"""Inputs of a recording, and the conditions under which a recorded program may run again.

strategy             `Strategy`: the typed options of static programs, and the passes that they select
default_overlap      the schedule of collectives that programs of devices with streams have by default
strategy_toml        read and write strategies as TOML
recorded_model       the network, loss, optimizer and strategy of a recording
setting              compare the state that a program was recorded in with the present state
fast_setting         compare the objects of a setting by identity, in C code
setting_text         describe layouts, hooks and torch's state as text, for other processes
digest               checksum of everything that determines a program
variants             find the program for a batch, and choose the sizes that the next program leaves open
program_inputs       fetch the inputs of a program at each call, and lay out parameters for them
loss_scale           the loss scale that programs read and update
memory_overlap       find inputs that share memory, which a program must not write in place
fixed_sums           refuse options that change the order of sums
refuse_call          refuse calls in which a program's step would differ from Python's
shared_recordings    record a program once for all simulated ranks of a process
recording_progress   show the phases of a recording on a terminal, with their seconds
without_gc           switch off Python's garbage collector during a phase
"""
