"""Products of inputs with the codes of a stored weight, without its numbers as a whole in memory.

operators   the operators packed_linear and integer_linear, their local computation and their sharding rules
kernels     the C++ kernels of both, split among the threads of the process
choice      which product is the fastest for a number of rows, from measured times
"""

from .choice import takes_codes
from .operators import integer_product, packed_product

__all__ = ["integer_product", "packed_product", "takes_codes"]
