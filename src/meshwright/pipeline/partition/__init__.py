"""A captured program, split into stages, actions and slices of sequences.

stages                   split_stages: the chunk of each node, from the marks that move values between meshes
mirrored_model           mirrored: the second copy of a model in a bidirectional pipeline
chunk_times              relative forward and backward times of chunks, counted from the program
buffer_check             check that a table passes buffers from one microbatch to the next in order
sequence_slicer          sliced: the forward pass in slices of its sequence
slice_operators          operators that can be sliced though their rules do not shard them
repeated_concatenation   concatenations of keys and values, repeated in a sliced backward pass
step_parts               RankParts: a recorded training step, split into the parts of each action
epilogue                 the program after all microbatches, which reads means over the microbatches
microbatch_inputs        MicrobatchInputs: inputs of microbatches, as pieces of one batch or separate batches
step_program             a pipeline step as one program and a table of names, and back
"""
