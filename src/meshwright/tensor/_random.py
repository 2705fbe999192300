"""Random operators: the same global numbers whatever the layout and the mesh.

    "torch"    every rank draws the whole tensor from torch's own generator, which all ranks have in the same state,
               and keeps its part: the numbers of one device, to the bit; costs the whole drawing on each rank.
    "rank"     every rank draws only its part: cheapest, other numbers on every mesh.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.layout import replicated

from ._absent import Absent, make_absent
from ._convert import convert_local
from ._dist_tensor import DistTensor, local_rank, stamp
from ._local import whole_spec
from .torch_hooks import no_interception

Source = Literal["torch", "rank"]


class _State(threading.local):
    source: Source = "torch"


_state = _State()


@contextmanager
def random_source(source: Source) -> Iterator[None]:
    """Inside, random operators on distributed tensors draw by this source."""
    before, _state.source = _state.source, source
    try:
        yield
    finally:
        _state.source = before


def _drawn(x: DistTensor, draw: Any) -> Tensor:
    """This rank's part of what `draw` makes of an empty whole tensor."""
    spec = x._spec
    if _state.source == "rank":
        return draw(torch.empty(spec.local_shape(local_rank()), dtype=spec.dtype, device=x.device))
    whole = draw(torch.empty(spec.shape, dtype=spec.dtype, device=x.device))
    if type(x) is Absent:
        return x
    return convert_local(whole, whole_spec(spec).with_dtype(whole.dtype), spec.with_dtype(whole.dtype))


def fill_random(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """`x.normal_()` and its like: what `x` held does not matter."""
    x = args[0]
    if type(x) not in (DistTensor, Absent) or any(isinstance(a, Tensor) for a in args[1:]):
        return NotImplemented
    with no_interception():
        x.copy_(_drawn(x, lambda whole: func(whole, *args[1:], **kwargs)))
    return x


def like_random(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """`torch.rand_like(x)` and its like: only the shape of `x` matters."""
    x = args[0]
    if type(x) not in (DistTensor, Absent):
        return NotImplemented
    spec = x._spec.with_layout(x._spec.layout if not x._spec.layout.partial else replicated(x._spec.ndim))
    with no_interception():
        like = x.detach() if type(x) is Absent else stamp(x.detach(), spec)
        local = _drawn(like, lambda whole: func(whole, *args[1:], **kwargs))
        spec = spec.with_dtype(local.dtype)
    return make_absent([spec], [x])[0] if type(x) is Absent else stamp(local, spec)


def dropout(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Dropout by a mask that is drawn whole; terms stay pending, since it is linear."""
    x = args[0] if args else kwargs.get("input")
    p, train = _dropout_arguments(args[1:], kwargs)
    if type(x) not in (DistTensor, Absent) or not train or p in (0.0, 1.0) or not isinstance(p, float):
        return NotImplemented
    spec = whole_spec(x._spec) if x._spec.layout.partial else x._spec
    if type(x) is Absent:
        _drawn(x, lambda whole: torch.dropout(torch.ones_like(whole), p, True))
        return make_absent([spec], [x])[0]
    x = x if spec is x._spec else stamp(convert_local(x, x._spec, spec), spec)
    with no_interception():
        ones = _drawn(x, lambda whole: torch.dropout(torch.ones_like(whole), p, True))
    return x * stamp(ones, spec.with_dtype(ones.dtype))


def _dropout_arguments(rest: Any, kwargs: Any) -> tuple[Any, bool]:
    p = rest[0] if rest else kwargs.get("p", 0.5)
    train = rest[1] if len(rest) > 1 else kwargs.get("training", kwargs.get("train", True))
    inplace = rest[2] if len(rest) > 2 else kwargs.get("inplace", False)
    return (p, bool(train)) if not inplace else (p, False)
