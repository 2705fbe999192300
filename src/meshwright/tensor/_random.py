"""Random operators: the same global numbers whatever the layout and the mesh.

"torch"    every rank draws the whole tensor from torch's own generator, which all ranks have in the same state,
           and keeps its part: the numbers of one device, to the bit; costs the whole drawing on each rank.
"rank"     every rank draws only its part: cheapest, other numbers on every mesh.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.layout import Spec

from ._absent import Absent, make_absent
from ._convert import convert_local
from ._dist_tensor import DistTensor, local_rank, stamp
from ._local import dense_strides, whole_spec
from .torch_hooks import no_interception

Source = Literal["torch", "rank"]


class _State(threading.local):
    source: Source = "torch"


_state = _State()


@contextmanager
def random_source(source: Source) -> Generator[None]:
    """Inside, random operators on distributed tensors draw by this source."""
    before, _state.source = _state.source, source
    try:
        yield
    finally:
        _state.source = before


def _drawn(x: DistTensor, spec: Spec, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """This rank's part, under `spec`, of what `draw` makes of an empty whole tensor like `x`."""
    if _state.source == "rank":
        return draw(torch.empty(spec.local_shape(local_rank()), dtype=spec.dtype, device=x.device))
    whole = torch.empty(spec.shape, dtype=spec.dtype, device=x.device)
    strides = dense_strides(x, spec.shape)
    if strides is not None:
        whole = torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device=x.device)
    whole = draw(whole)
    if type(x) is Absent:
        return whole
    return convert_local(whole, whole_spec(spec).with_dtype(whole.dtype), spec.with_dtype(whole.dtype))


def fill_random(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """`x.normal_()` and its like: what `x` held does not matter."""
    x = args[0]
    if type(x) not in (DistTensor, Absent) or any(isinstance(a, Tensor) for a in args[1:]):
        return NotImplemented
    with no_interception():
        local = _drawn(x, x._spec, lambda whole: func(whole, *args[1:], **kwargs))
        if type(x) is DistTensor:
            x.copy_(local)
    return x


def like_random(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """`torch.rand_like(x)` and its like: only the shape of `x` matters."""
    x = args[0]
    if type(x) not in (DistTensor, Absent):
        return NotImplemented
    spec = x._spec if not x._spec.layout.partial else whole_spec(x._spec)
    with no_interception():
        local = _drawn(x, spec, lambda whole: func(whole, *args[1:], **kwargs))
        spec = spec.with_dtype(local.dtype)
    return make_absent([spec], [x])[0] if type(x) is Absent else stamp(local, spec)


def dropout(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Dropout by a mask that is drawn whole; terms are joined first, since each element is dropped once."""
    x = args[0] if args else kwargs.get("input")
    p, train, inplace = _dropout_arguments(args[1:], kwargs)
    if type(x) not in (DistTensor, Absent) or not 0 <= p < 1:
        return NotImplemented
    if not train or p == 0:
        return x
    if inplace:
        return x.copy_(dropout(func, types, (x, p), {}))
    spec = whole_spec(x._spec) if x._spec.layout.partial else x._spec
    with no_interception():
        mask = _drawn(x, spec, lambda whole: torch.dropout(torch.ones_like(whole), p, True))
    if type(x) is Absent:
        return make_absent([spec], [x])[0]
    if spec is not x._spec:
        x = stamp(convert_local(x, x._spec, spec), spec)
    return x * stamp(mask, spec.with_dtype(mask.dtype))


def _dropout_arguments(rest: Any, kwargs: Any) -> tuple[float, bool, bool]:
    p = rest[0] if rest else kwargs.get("p", 0.5)
    train = rest[1] if len(rest) > 1 else kwargs.get("training", kwargs.get("train", True))
    inplace = rest[2] if len(rest) > 2 else kwargs.get("inplace", False)
    return float(p), bool(train), bool(inplace)
