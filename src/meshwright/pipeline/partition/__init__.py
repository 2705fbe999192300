"""A captured program, split into stages and actions.

stages                   split_stages: the chunk of each node, from the marks that move values between meshes
mirrored_model           mirrored: the second copy of a model in a bidirectional pipeline
chunk_times              relative forward and backward times of chunks, counted from the program
buffer_check             check that a table passes buffers from one microbatch to the next in order
step_parts               RankParts: a recorded training step, split into the parts of each action
epilogue                 the program after all microbatches, which reads means over the microbatches
microbatch_inputs        MicrobatchInputs: inputs of microbatches, as pieces of one batch or separate batches
step_program             a pipeline step as one program and a table of names, and back
"""
