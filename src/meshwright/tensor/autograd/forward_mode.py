"""Forward-mode derivatives: the tangent of a distributed tensor has the layout of the tensor.

torch stores the tangent of a tensor on the tensor itself. So the operators that run on local parts compute the local
parts of tangents, and a conversion between layouts converts the tangent like the value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.layout import Spec, TorchValue

from .._torch_call import TorchFunction
from ..conversion.convert import convert_local
from ..conversion.local_parts import linear_spec, spec_of, whole_local
from ..core.absent_tensor import absent
from ..core.dist_tensor import DistTensor, as_part, plain_view
from ..core.handler_registry import handles
from ..core.tree import map_tensors
from ..torch_hooks import call_plain, no_interception
from .intercepted_call import named_arguments
from .torch_hooks import MAKE_DUAL, UNPACK_DUAL


@handles(MAKE_DUAL, torch.ops.aten._make_dual.default)
def _make_dual(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the tensor with the tangent, which is converted to the tensor's layout first."""
    given = named_arguments(("tensor", "tangent", "level"), args, kwargs)
    x, tangent = given.pop("tensor", given.pop("primal", None)), given.pop("tangent")
    if not isinstance(x, DistTensor):
        return func(x, whole_local(tangent), **given)
    spec = linear_spec(x._spec)
    local = convert_local(x, x._spec, spec)
    have = spec_of(tangent, spec)
    there = convert_local(tangent, have, spec.with_dtype(have.dtype))
    with no_interception():
        out = func(plain_view(local), plain_view(there), **given)
    return _stamped(out, spec, x._away)


@handles(UNPACK_DUAL, torch.ops.aten._unpack_dual.default)
def _unpack_dual(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    x = args[0] if args else next(iter(kwargs.values()))
    out = call_plain(func, types, args, kwargs)
    return map_tensors(lambda t: _stamped(t, x._spec, x._away), out)


def _stamped(local: Tensor, spec: Spec, away: bool) -> Tensor:
    spec = spec.with_dtype(local.dtype)
    return absent(local, spec) if away else as_part(local, spec)
