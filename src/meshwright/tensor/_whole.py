"""Calling a function on the whole tensors: slow, and right for every operator."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import whole_of

from ._convert import convert_local
from ._dist_tensor import DistTensor, plain_view
from ._errors import RanWholeWarning
from ._local import whole_spec
from ._tree import map_tensors, tensors_in
from .torch_hooks import no_interception

RAN_WHOLE: dict[str, str] = {}
"""Functions that ran on whole tensors for want of a rule, and why; told once each."""


def tell_whole(name: str, why: str) -> None:
    """Warns, once for each name, from the line that called the function which called this one."""
    if name not in RAN_WHOLE:
        RAN_WHOLE[name] = why
        warnings.warn(f"{name} runs on whole tensors: {why}", RanWholeWarning, stacklevel=5)


@dataclass(frozen=True, slots=True)
class WholeCall:
    """What a function gave on whole tensors: its result, and each argument beside the whole tensor it was given as."""

    out: Any
    pairs: tuple[tuple[Tensor, Tensor], ...]

    def gathered(self) -> tuple[tuple[DistTensor, Tensor], ...]:
        """The arguments whose whole tensor has memory of its own."""
        return tuple((t, w) for t, w in self.pairs if isinstance(t, DistTensor) and whole_spec(t._spec) is not t._spec)


def call_whole(func: Any, args: Any, kwargs: Any) -> WholeCall:
    """`func` on the whole tensors, on every rank alike; what it wrote into them is put back into the parts."""
    tensors = {id(t): t for t in tensors_in((args, kwargs))}
    whole = {key: _whole(t) for key, t in tensors.items()}
    with no_interception():
        versions = {key: w._version for key, w in whole.items()}
        out = func(
            *map_tensors(lambda t: whole[id(t)], args),
            **{k: map_tensors(lambda t: whole[id(t)], v) for k, v in kwargs.items()},
        )
        written = [key for key, w in whole.items() if w._version != versions[key]]
    done = WholeCall(out, tuple((t, whole[key]) for key, t in tensors.items()))
    for t, w in done.gathered():
        if id(t) in written:
            put_back(t, w)
    return done


def _whole(t: Tensor) -> Tensor:
    """Return the whole tensor with its global strides; in memory of its own unless the part is the whole tensor."""
    if not isinstance(t, DistTensor):
        return t
    spec = t._spec
    out = convert_local(t, spec, whole_spec(spec))
    with no_interception():
        if whole_spec(spec) is spec:
            return plain_view(out)
        if spec.strides is not None:
            return _with_strides(out, spec.strides)
        return out.clone() if spec.layout.is_replicated else out


def _with_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy of `x` with these strides; differentiable."""
    if 0 in strides:
        return _Overlapping.apply(x, strides)  # pyright: ignore[reportReturnType] - torch's stub: anything
    return whole_of(x, strides)


class _Overlapping(torch.autograd.Function):
    """A copy of which several elements share memory; each element has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strides: Sequence[int]) -> Tensor:
        return whole_of(x, strides)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def put_back(t: DistTensor, whole: Tensor) -> None:
    """Writes the whole value into the parts of `t`."""
    have = whole_spec(t._spec).contiguous
    local = convert_local(whole, have, have.with_layout(t._spec.layout))
    with no_interception():
        t.copy_(local)
