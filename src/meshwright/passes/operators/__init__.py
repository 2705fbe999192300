"""Passes that leave fewer and larger operators.

In reading order:

    identity_removal       removal of operators without effect, such as casts to the same dtype
    common_subexpressions  equal nodes merged, so that each value is computed and sent once
    fuse_activation        hand-written linear layers and activations as one operator each
    fuse_norm              hand-written RMS norms and layer norms as one operator
    fuse_attention         hand-written attention as `scaled_dot_product_attention`
    fuse_loss              hand-written cross entropy as one operator
    fuse_accumulation      `acc + a @ b` as one operator, for accumulated gradients
    one_row_products       batched products of single rows with one matrix as one product
    foreach                the optimizer's operators on single parameters as operators on lists
"""
