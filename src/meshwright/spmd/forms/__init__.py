"""Local forms: local functions that run instead of an operator if a factor is sharded or a shard is empty.

In reading order:

    empty_tensors      kernels that refuse empty tensors, which ranks without a shard hold
    reductions         reductions, norms, softmax and running sums along sharded dims
    layers             embedding with a sharded table, attention over sharded keys
    class_losses       cross entropy and negative log likelihood over sharded classes
    attention_tiles    attention of some rows to some keys by fused kernels, and the merge of such tiles
    block_tiles        tiles in blocks of rows, for documents and dropout
    zigzag             the order of a sequence in which causal attention is equal work for all ranks
    ring_attention     context parallelism: ring and Ulysses attention along a sharded sequence
    document_attention attention in packed sequences, on one device and along a sharded sequence
    dropped_attention  attention with dropout, in blocks of rows that draw their own factors
    grouped_products   grouped matrix products, with rows ordered by group
    convolutions       convolutions and normalizations: groups, rows of neighbours, sums over ranks
    indexing           lookups and writes along a sharded dim: each rank handles the indices that it holds
"""
