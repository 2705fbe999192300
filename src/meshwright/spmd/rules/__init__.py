"""The rules of ATen operators, one module for each kind of operator, and the table of all rules.

In reading order:

    pointwise      elementwise operators, grouped by linearity
    products       matmul and related operators, einsum, linear layers
    shapes         operators that only move elements: views, permutations, slices, splits
    joins          operators that join or stack tensors: `cat`, `stack` and similar ones
    reductions     reductions, normalizations and running sums
    layers         embedding and attention
    recurrent      recurrent layers: samples are independent, time is whole
    losses         elementwise losses with a reduction, and losses over classes
    new_tensors    operators that read only dtype and device, such as `new_zeros`
    indexing       reads and writes by index
    linalg         operators on whole matrices: decompositions, solvers, transforms
    convolutions   convolutions, pooling, resampling, and normalizations over channels
    quantized      products of codes and of float8 numbers, fake quantization
    registration_check  checks of a rule that a user registers
    rule_table     `find_rule` and `register_rule`: ATen operator to rule
"""
