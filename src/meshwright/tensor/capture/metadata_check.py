"""Check of results from meta tensors: correct for shapes and dtypes, but not for addresses, storages or devices."""

from __future__ import annotations

from types import FunctionType

import torch
from torch import Tensor

from .._errors import MemoryAccessError
from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..core.dist_tensor import DistTensor
from ..core.tree import leaves_in, tensors_in
from ..torch_hooks import Operator, returns_dtype

_PLAIN = (bool, float, complex, type(None), torch.dtype, torch.layout, torch.memory_format)
"""Types that never hold an address or a device."""
_COUNTS = [
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__", "dense_dim", "sparse_dim", "dim_order",
    "q_zero_point", "_dimI", "_dimV", "_nnz",
]  # fmt: skip
_COUNTED = ["itemsize", "nbytes", "ndim", "shape"]
_NUMBERS: frozenset[TorchFunction] = frozenset([
    *[getattr(Tensor, name) for name in _COUNTS if hasattr(Tensor, name)],
    *[getattr(Tensor, name).__get__ for name in _COUNTED],
    torch.numel,
])  # fmt: skip
"""C++ functions that return integers which are sizes, not addresses."""
_OPERATORS = frozenset([*_COUNTS, *_COUNTED, "len", "stride"])
"""Names of operators that return sizes."""


def check_meta_result(func: TorchFunction, args: Arguments, kwargs: NamedArguments, answer: object) -> None:
    """Raise MemoryAccessError if `answer`, the result of `func` for a meta tensor, may concern memory or a device.

    Raises TypeError for NotImplemented, as torch's own operators do: Python then asks the other operand, or compares
    the objects.
    """
    if answer is NotImplemented:
        raise TypeError(f"unsupported operand type for {getattr(func, '__name__', repr(func))}")
    known = (*_PLAIN, int) if _is_about_shape(func) else _PLAIN
    wrong = next((leaf for leaf in leaves_in(answer) if not isinstance(leaf, known)), None)
    if wrong is None:
        return
    x = next(t for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor))
    raise MemoryAccessError(
        getattr(func, "__name__", repr(func)),
        f"{x._spec!r}; the answer is a {type(wrong).__name__}",
        "the call reads memory, and this rank holds only a part",
        "call it on x.to_local() or mw.unshard_dtensor(x)",
    )


def _is_about_shape(func: TorchFunction) -> bool:
    """True if integers that `func` returns are sizes or dtypes."""
    if not isinstance(func, Operator):
        return func in _NUMBERS or isinstance(func, FunctionType)
    name = func._schema.name.partition("::")[2].removeprefix("sym_")
    return name in _OPERATORS or returns_dtype(func)
