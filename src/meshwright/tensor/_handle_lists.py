"""Functions of many tensors that are one call per tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._registry import handles


@handles(torch.broadcast_tensors, torch.ops.aten.broadcast_tensors.default)
def _broadcast_tensors(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    tensors = args[0] if len(args) == 1 and not isinstance(args[0], Tensor) else args
    shape = torch.broadcast_shapes(*[t.shape for t in tensors])
    return tuple(t.expand(shape) for t in tensors)


_EACH = {name: getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_")}


@handles(*_EACH.values())
def _foreach(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """One call per tensor of the lists."""
    name = func.__name__.removeprefix("_foreach_")
    one = getattr(Tensor, name, None) or getattr(torch, name)

    def at(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, (list, tuple)) else value

    if name.startswith(("addcmul", "addcdiv")) and len(args) > 3:
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    out = [one(*[at(a, i) for a in args], **{k: at(v, i) for k, v in kwargs.items()}) for i in range(len(args[0]))]
    return None if name.endswith("_") else out
