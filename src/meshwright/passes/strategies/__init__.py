"""Passes that change how the training step is computed: precision, sharding, gradient accumulation.

In reading order:

    amp                     automatic mixed precision: operators in half precision, parameters unchanged
    sequence_parallel       sequence parallelism between tensor-parallel layers
    shard_parameters        ZeRO: parameters, gradients and states sharded over the axes that shard the batch
    gradient_accumulation   a batch in pieces, whose gradients are summed before one update
"""
