"""The same numbers on every mesh: sums and products in a fixed order.

In reading order:

    kernel_check   check of the property of torch's kernels that the order depends on
    kernels        sums and products of local tensors in an order that depends on global sizes only
    piece_products such products by a C++ kernel, where there is a compiler
    piece_sums     such sums by a C++ kernel
    operators      operators with such sums, their sharding rules and local forms
    microbatches   pieces of the batch in a microbatch, and sums over microbatches
    derivatives    functions whose gradients are such sums
    functions      replacements of torch's functions by such functions
    calls          functions that need no replacement, and gradients of operands that broadcast
    same_numbers   the context in which the replacements are used
    torch_hooks    the private names of torch
    _errors        the errors of the package
"""

from ._errors import SameNumbersError
from .microbatches import GradientTrees, MicrobatchTree, one_of_microbatches
from .same_numbers import SameNumbers, in_same_numbers, only_recordings, same_numbers

__all__ = [
    "GradientTrees",
    "MicrobatchTree",
    "SameNumbers",
    "SameNumbersError",
    "in_same_numbers",
    "one_of_microbatches",
    "only_recordings",
    "same_numbers",
]
