"""Passes that leave fewer and smaller collectives, or overlap them with operators.

In reading order:

    conversion_chains         chains of conversions replaced by the cheapest plan between their ends
    deferred_reductions       reductions moved after linear operators, and merged in sums
    reduce_scatter            all-reduce and slice replaced by reduce-scatter
    hierarchical_all_reduce   all-reduce in three steps, for less traffic on slow links
    bucket                    small collectives packed into one row, sent at once, and unpacked
    row_pieces                operators computed by groups of rows
    split_products            matrix products split before an all-reduce, to send pieces early
    overlap_schedule          order in which collectives overlap with operators, by list scheduling
"""
