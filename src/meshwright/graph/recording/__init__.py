"""Recording of operators that run on fake tensors, as nodes without writes.

In reading order:

    symbolic_numbers    symbolic sizes, learning rates and results of `.item()` as values of the program
    functionalization   current value of each tensor, also after writes to it or to a view of it
    out_of_place_form   out-of-place operator that computes what an in-place operator writes
    detached_writes     check for writes through `.data` to a tensor that a backward pass reads
    recording           `Recording`: the nodes recorded so far, and the value of every tensor
    size_expressions    symbolic sizes and conditions on them as rows of plain data
    dynamic_sizes       sizes that may change from call to call, and the conditions under which they may
"""
