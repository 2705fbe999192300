"""Explain, trace and verify what a parallel program does.

explain            `explain`: a table of the layout decisions for each call
comm_trace         `trace_comm`: the collectives of a rank in order, with the lines that need them
traced_call        one collective or message in a trace
traced_work        record the work of a rank with its times
trace_file         write the traces of all ranks as a Chrome trace
verify             `verify`: compare a model on one device with the model on a mesh
observed_tensors   record the inputs, outputs and gradients of a model's modules in one pass
"""
