"""Products of inputs with the codes of a stored weight, without its numbers as a whole in memory.

operators   the operators packed_linear and integer_linear, their local computation and their sharding rules
kernels     the C++ kernels of both, split among the threads of the process
choice      whether a product takes the codes
most_rows   the table by which it is chosen
measuring   measure that table
"""

from .choice import takes_codes
from .measuring import measure_rows
from .most_rows import ANY, MostRows, built_in_rows, keep_rows
from .operators import integer_product, packed_product

__all__ = [
    "ANY",
    "MostRows",
    "built_in_rows",
    "integer_product",
    "keep_rows",
    "measure_rows",
    "packed_product",
    "takes_codes",
]
