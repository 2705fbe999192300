"""Properties of a program, computed from its nodes: memory, work, strides, constants, validity.

In reading order:

    live_memory        values that share memory (aliases), and the live bytes at each node
    node_work          work of a node: operations, and bytes read and written
    strides            strides of every value, by a run on meta tensors
    linear_tail        last linear operations on a value, which may as well be applied to a sum of such values
    constant_folding   values that depend on constants alone, to compare two passes of one call
    verify             validity: values are produced once, before they are read; operators accept arguments
"""
