"""Programs as data: nodes on values in single-assignment form, and functions that read and edit them.

In reading order:

    node              `Value` and `Node`, and the operators that a node may have besides ATen operators
    rank_numbers      numbers that depend on the rank: local length, offset, position along mesh axes
    node_text         text form of nodes, for readers and golden files
    layouts           table of the layouts of a program's values, and the parser of its text
    backward_reads    operands and results that an operator's backward pass reads, found by autograd
    program           `Program`: inputs, nodes, outputs, written inputs, and the record of changes
    effects           side effects of nodes: which nodes may be removed, moved or merged
    shape_inference   shapes and dtypes of an operator's results, by a run on fake tensors
    draft             `Draft`: a program as a linked list, in which nodes are moved, replaced or removed
"""
