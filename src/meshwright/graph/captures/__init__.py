"""Capture of a model's forward pass on fake unsharded tensors.

In reading order:

    interception          users' autograd functions, tensor hooks and uses of gradients, seen while they run
    external_writes       writes to external tensors, such as a running mean of a loss; the program does them
    constant_masks        indexing by constant masks, as indexing by the positions that they select
    capture_environment   context in which a forward pass runs on fake tensors and is recorded
    capture               `capture`: the program of a call, its parameters and buffers, and its guards
"""
