"""Calling a function on the whole tensors: slow, and right for every operator."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._convert import convert_local
from ._dist_tensor import DistTensor, plain_view
from ._errors import RanWholeWarning
from ._local import dense_strides, whole_spec
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
    """The whole tensor, in the memory order that the parts have."""
    if not isinstance(t, DistTensor):
        return t
    out = convert_local(t, t._spec, whole_spec(t._spec))
    with no_interception():
        if whole_spec(t._spec) is t._spec:
            return plain_view(out)
        if t._spec.layout.is_replicated:
            return out.clone()
        strides = dense_strides(t, out.shape)
        if strides is not None:
            out = torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device).copy_(out)
        return out


def put_back(t: DistTensor, whole: Tensor) -> None:
    """Writes the whole value into the parts of `t`."""
    local = convert_local(whole, whole_spec(t._spec), t._spec)
    with no_interception():
        t.copy_(local)
