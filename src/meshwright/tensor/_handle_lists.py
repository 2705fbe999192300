"""Lists among arguments: functions of many tensors that are one call per tensor, and lists of numbers as indices."""

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


@handles(Tensor.__getitem__, Tensor.__setitem__)
def _listed_index(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """A list of whole numbers among the indices is a tensor: torch makes one where nobody sees what it holds."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(_is_whole_numbers(i) for i in index):
        return NotImplemented
    return func(args[0], tuple(torch.tensor(i) if _is_whole_numbers(i) else i for i in index), *args[2:])


def _is_whole_numbers(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and all(type(n) is int or _is_whole_numbers(n) for n in x)
