"""Random operators: by default the same global numbers for every layout and every mesh.

"torch"    every rank draws the whole tensor from torch's own generator, which all ranks have in the same state,
           and keeps its part: exactly the numbers of one device; each rank pays for the whole draw.
"counter"  every rank computes only its part, from a key that is drawn from torch's generator once per call: the same
           global numbers on every mesh, but not those of one device (`counter_draws`). Other distributions use "torch".
"rank"     every rank draws only its part: cheapest, other numbers on every mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Layout, Spec, TorchValue, is_contiguous

from .._errors import RandomSourceError
from .._torch_call import TorchFunction
from ..autograd.intercepted_call import argument_at, named_arguments
from ..conversion.convert import arranged, convert_local
from ..conversion.local_parts import is_empty, spec_of_whole
from ..core.absent_tensor import make_absent
from ..core.capture_marks import record_as_one_node
from ..core.computation_numbers import note_drawing
from ..core.dist_tensor import DistTensor, as_part, local_rank
from ..core.rank_setting import PerRank
from ..torch_hooks import no_interception
from .counter_draws import DISTRIBUTIONS, Counted, draw_bits, is_counted

RandomSource = Literal["torch", "counter", "rank"]


_sources: PerRank[RandomSource] = PerRank("torch")

current_random_source = _sources.get


def random_source(source: RandomSource) -> AbstractContextManager[None]:
    """Set the source of random operators on distributed tensors inside the block: "torch", "counter" or "rank".

    Raises RandomSourceError for another name.
    """
    if source not in get_args(RandomSource):
        raise RandomSourceError(
            f"random_source({source!r})",
            repr(source),
            "there is no such source of random numbers",
            'use "torch" for the numbers of one device, "counter" for numbers that are equal on every mesh and that '
            'each rank draws for its own part, or "rank" for the cheapest',
        )
    return _sources.holding(source)


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw: the tensor's method that fills it, or "dropout" for a mask, and its arguments.

    With `like`, the result is a new tensor made with these arguments of `empty_like`, perhaps of another dtype.
    """

    name: str
    args: tuple[TorchValue, ...] = ()
    kwargs: Mapping[str, TorchValue] = field(default_factory=dict[str, TorchValue])
    like: Mapping[str, TorchValue] | None = None

    def empty(self, x: Tensor) -> Tensor:
        """Return the tensor to fill, with the shape and the memory format of `x`."""
        return x if self.like is None else torch.empty_like(x, **self.like)

    def fill(self, x: Tensor) -> Tensor:
        """Fill `x`, or a new tensor like it, by torch; return it."""
        if self.name == "dropout":
            return torch.dropout(torch.ones_like(x), self.args[0], True)
        out = self.empty(x)
        with torch.no_grad():
            getattr(out, self.name)(*self.args, **self.kwargs)
        return out

    def count(self, x: Tensor, spec: Spec) -> Tensor:
        """Fill `x`, or a new tensor like it, by counters as this rank's part under `spec`; return it."""
        out = self.empty(x)
        if self.name != "dropout":
            getattr(out.new_empty(0), self.name)(*self.args, **self.kwargs)  # refuses what torch refuses
        bits = draw_bits(self.kwargs.get("generator"))
        if local_rank() not in spec.mesh:
            return out
        values = DISTRIBUTIONS[self.name].values(self.args, self.kwargs)
        part = spec.with_dtype(out.dtype).with_layout(Layout(spec.layout.dims))
        draw = Counted(self.name, tuple(values), part, out.device)
        with torch.no_grad():
            out.copy_(record_as_one_node(draw, (bits,), draw.empty))
        return convert_local(out, part, part.with_layout(spec.layout)) if spec.layout.partial else out


def _draw_part(x: DistTensor, spec: Spec, draw: Draw) -> tuple[Tensor, Spec]:
    """Return this rank's part of numbers drawn for a whole tensor like `x`, in the layout of `spec`, and its spec.

    Torch fills a tensor in memory order, so the whole tensor is drawn with the global strides of `x`.
    """
    dtype = (draw.like or {}).get("dtype") or spec.dtype
    source = current_random_source()
    if source != "rank":
        note_drawing(x.device, draw.kwargs.get("generator"))
    if source == "torch" or (source == "counter" and not is_counted(draw.name, dtype)):
        whole = draw.fill(_empty_strided(spec.shape, x._spec.full_strides, spec.dtype, x.device))
        have = spec_of_whole(whole, spec.mesh)
        need = Spec(spec.mesh, spec.layout, spec.shape, whole.dtype, have.strides).new
        return (whole if x._away else convert_local(whole, have, need)), need
    rank = current_communicator().rank
    part = _empty_strided(spec.local_shape(rank), spec.local_strides(rank), spec.dtype, x.device)
    part = draw.count(part, spec) if source == "counter" else draw.fill(part)
    return arranged(part, spec), spec.new.with_dtype(part.dtype)


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor; if it is contiguous, `empty` makes it, which recorded programs expect."""
    if is_contiguous(shape, strides):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)


def fill_random(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Fill a tensor by `x.normal_()` and similar methods; its old values do not matter."""
    x, *rest = args
    if not isinstance(x, DistTensor) or any(isinstance(a, Tensor) for a in (*rest, *kwargs.values())):
        return NotImplemented
    with no_interception():
        local, _ = _draw_part(x, x._spec, Draw(func.__name__.split(".")[0], tuple(rest), kwargs))
        if not x._away:
            x.copy_(local)
    return x


_LIKE: dict[TorchFunction, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    torch.rand_like: ("uniform_", (), ("default",)),
    torch.randn_like: ("normal_", (), ("default",)),
    torch.randint_like: ("random_", ("low", "high"), ("default", "low_dtype")),
}
"""Function → the method that fills its result, its parameters before those of `empty_like`, and its overloads in
captured programs.
"""

LIKE = {
    f: (name, parameters)
    for function, (name, parameters, overloads) in _LIKE.items()
    for f in (function, *[getattr(getattr(torch.ops.aten, function.__name__), o) for o in overloads])
}
"""Function or operator → the method that fills its result, and the parameters before those of `empty_like`."""


def like_random(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the result of `torch.rand_like(x)` and similar functions; only the shape of `x` matters."""
    x, draw = _like_draw(func, args, dict(kwargs))
    if not isinstance(x, DistTensor):
        return NotImplemented
    spec = _without_pending_terms(x._spec)
    with no_interception():
        local, spec = _draw_part(x, spec, draw)
        shape_only = x.detach()
    return make_absent([spec], [shape_only])[0] if x._away else as_part(local, spec)


def _like_draw(func: TorchFunction, args: TorchValue, kwargs: dict[str, TorchValue]) -> tuple[TorchValue, Draw]:
    """Return the tensor that the result is like, and the draw of the call."""
    name, parameters = LIKE[func]
    x = args[0] if args else kwargs.pop("input")
    bounds = [*args[1:], *[kwargs.pop(p) for p in parameters if p in kwargs]]
    if parameters and len(bounds) == 1:
        bounds.insert(0, 0)
    generator = kwargs.pop("generator", None)
    return x, Draw(name, tuple(bounds), {"generator": generator} if generator is not None else {}, kwargs)


def dropout(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Apply dropout by a mask; pending terms are reduced first, since each element is dropped once."""
    x = argument_at(args, kwargs, 0, "input")
    p, train, inplace = dropout_arguments(args[1:], kwargs)
    if not isinstance(x, DistTensor) or not 0 <= p < 1:
        return NotImplemented
    if not train or p == 0 or is_empty(x):
        return x
    if inplace:
        return x.copy_(dropout(func, types, (x, p), {}))
    spec = _without_pending_terms(x._spec)
    with no_interception():
        mask, drawn = _draw_part(x, spec, Draw("dropout", (p,)))
    if x._away:
        return make_absent([spec], [x])[0]
    if spec is not x._spec:
        x = as_part(convert_local(x, x._spec, spec), spec)
    return x * as_part(mask, drawn)


def _without_pending_terms(spec: Spec) -> Spec:
    """Return the spec with the same sharding and memory order, and no pending terms."""
    if not spec.layout.partial:
        return spec
    return spec.with_layout(replace(spec.layout, partial=())).with_strides(spec.new.strides)


def dropout_arguments(rest: Sequence[TorchValue], kwargs: TorchValue) -> tuple[float, bool, bool]:
    """Return the dropped fraction, whether the call drops anything, and whether in place.

    `rest` are the positional arguments after the first one.
    """
    given = named_arguments(("p", "train", "inplace"), rest, kwargs)
    train = given.get("training", given.get("train", True))
    return float(given.get("p", 0.5)), bool(train), bool(given.get("inplace", False))
