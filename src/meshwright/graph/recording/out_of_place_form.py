"""The out-of-place form of an operator that writes to its first argument, if the result fits the argument."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from meshwright.layout import Cache, TorchValue
from meshwright.tensor import key_of_tree, leaves_in, map_tensors, tensors_in

from ..program.effects import is_random_operator
from ..torch_hooks import FakeTensor, Operator, faked, no_modes
from .functionalization import functional

_known: Cache[Hashable, bool] = Cache(4096)
"""True if the result fits, by operator and arguments. Optimizers repeat their calls for every parameter."""


def out_of_place_form(op: Operator, args: Sequence[TorchValue], kwargs: Mapping[str, TorchValue]) -> Operator | None:
    """Return the out-of-place form of `op`, or None if its result does not fit the written argument."""
    twin = functional(op)
    if twin is None or is_random_operator(op):
        return None
    if any(map(_has_symbolic_size, leaves_in((args, kwargs)))):
        return twin if _fits(twin, args, kwargs) else None
    key = twin, torch.get_default_dtype(), key_of_tree((args, kwargs), _key_of_argument)
    if key not in _known:
        _known[key] = _fits(twin, args, kwargs)
    return twin if _known[key] else None


def _has_symbolic_size(x: TorchValue) -> bool:
    """True for a symbolic integer, which may be a size, and for a tensor with a symbolic size."""
    if isinstance(x, Tensor):
        return any(isinstance(n, torch.SymInt) for n in x.shape)
    return isinstance(x, torch.SymInt)


def _key_of_argument(x: TorchValue) -> Hashable:
    """Return a key of the properties of an argument that determine the shape and the dtype of a result."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype, x.device
    return type(x) if isinstance(x, (float, complex, torch.SymFloat, torch.SymBool)) else (type(x), x)


def _fits(twin: Operator, args: Sequence[TorchValue], kwargs: Mapping[str, TorchValue]) -> bool:
    """True if the result of the call has the shape and the dtype of the first argument."""
    fake: TorchValue = next((x for x in tensors_in((args, kwargs)) if isinstance(x, FakeTensor)), None)
    with no_modes(), torch.no_grad():
        if fake is not None:
            args, kwargs = map_tensors(partial(faked, fake.fake_mode), (args, kwargs))
        out = twin(*args, **kwargs)
    return isinstance(out, Tensor) and out.dtype == args[0].dtype and out.shape == args[0].shape
