"""Sparse and nested tensors made from distributed ones: they hold whole values and are plain.

A layout divides dense memory, so a sparse or nested result is a plain tensor with the same value on every rank. Its
gradient flows back to the distributed tensors that it was made from. The C++ constructors would take a local part for
the whole tensor without calling `__torch_function__`, so each constructor is wrapped.
"""

from __future__ import annotations

import torch

from meshwright.layout import TorchValue

from .._torch_call import TorchFunction
from ..conversion.python_values import gather_everywhere
from ..core.dist_tensor import DistTensor
from ..core.tree import map_tensors, tensors_in
from ..torch_hooks import offer_call


def _construct_from_wholes(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return `own(*args, **kwargs)` of whole values; NotImplemented if no argument is distributed."""
    if not any(isinstance(t, DistTensor) for t in tensors_in((args, kwargs))):
        return NotImplemented
    args, kwargs = map_tensors(gather_everywhere, (args, kwargs))
    return own(*args, **kwargs)


CONSTRUCTORS = [
    *[(torch, name) for name in dir(torch) if name.startswith("sparse_") and name.endswith("_tensor")],
    *[(torch.nested, name) for name in torch.nested.__all__],
]
"""Functions that make a sparse or nested tensor: (module, name in the module)."""

for _module, _name in CONSTRUCTORS:
    offer_call(_module, _name, _construct_from_wholes)
