"""Save local parts for the backward pass, in place of the tensors that were gathered from them for a module.

A gathered parameter (ZeRO-3) or sequence (Korthikanti et al. 2022) is freed after its module's forward pass. It is
gathered again when a gradient needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.layout import Layout, Spec, TorchValue
from meshwright.tensor import DistTensor, as_part, distribute_as, local_parts, map_tensors, transforming

from ..torch_hooks import top_saved_hooks

Again = Callable[[], Tensor]
"""Function that returns this rank's part of a gathered tensor, after gathering it again if need be."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A tensor that was gathered, the function that gathers it again, and its version counter at that time."""

    again: Again
    whole: Tensor
    version: int


class _Live(threading.local):
    def __init__(self) -> None:
        self.found: dict[int, _Gathered] = {}


_live = _Live()
"""Address → the tensor that was gathered there, while a module that uses it runs."""


@dataclass(frozen=True, slots=True)
class _View:
    """The view of a tensor on its memory: dtype, offset, shape and strides, and lazy conjugation and negation."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool

    @staticmethod
    def by(x: Tensor) -> _View:
        return _View(x.dtype, int(x.storage_offset()), x.shape, x.stride(), x.is_conj(), x.is_neg())

    def of(self, memory: Tensor) -> Tensor:
        plain = torch.empty(0, dtype=self.dtype, device=memory.device)
        seen = plain.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)
        seen = seen.conj() if self.conjugate else seen
        return seen.neg() if self.negative else seen


@dataclass(frozen=True, slots=True)
class _SavedPart:
    """The object saved in place of a gathered tensor; `redeem` gathers it again, distributed if it has a spec."""

    again: Again
    view: _View
    spec: Spec | None

    def redeem(self) -> Tensor:
        with torch.no_grad():
            whole = self.again()
            with local_parts():
                found = self.view.of(whole)
        return found if self.spec is None else as_part(found, self.spec)


def remember_gathered(tensors: Iterable[tuple[Tensor, Again]]) -> list[int]:
    """Note gathered tensors, of which modules save parts from now on; return their addresses for `forget_gathered`."""
    if not torch.is_grad_enabled():
        return []
    found = {_address(whole): _Gathered(again, whole, whole._version) for whole, again in tensors}
    _live.found |= found
    return list(found)


def forget_gathered(addresses: Iterable[int]) -> None:
    """Remove the notes of gathered tensors."""
    for at in addresses:
        _live.found.pop(at, None)


class SavedPartHooks:
    """Save parts in place of gathered tensors, from `enter` to `leave`.

    If other hooks see what is saved, such as those of `torch.utils.checkpoint`, it is left to them: a checkpointed
    module saves nothing, and gathers again when it is run again.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Any, list[int]]] = []

    def enter(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Begin the run of a module with pairs of parts and gathered tensors; during capture nothing is replaced.

        The module also saves parts in place of tensors that `remember_gathered` has noted.
        """
        real = [(p, w) for p, w in pairs if isinstance(p, DistTensor) and isinstance(w, DistTensor) and p is not w]
        addresses = remember_gathered((whole, _gather_alone(part, whole.spec.layout)) for part, whole in real)
        top = top_saved_hooks(True)
        free = _live.found and not transforming() and (top is None or top[1] is _unpack)
        hooks = saved_tensors_hooks(_pack, _unpack) if free else nullcontext()
        self._open.append((hooks, addresses))
        hooks.__enter__()

    def leave(self) -> None:
        if not self._open:
            return
        hooks, addresses = self._open.pop()
        hooks.__exit__(None, None, None)
        forget_gathered(addresses)


def _gather_alone(part: DistTensor, layout: Layout) -> Again:
    """Return the function that gathers one tensor again."""
    return lambda: distribute_as(part.detach(), part.spec.mesh, layout)


def gather_inputs(layer: nn.Module, gather: Callable[[Tensor], Tensor]) -> None:
    """Gather the layer's inputs by `gather` from now on; the layer saves their local parts for the backward pass."""
    watch = SavedPartHooks()

    def before(_: nn.Module, inputs: TorchValue, named: TorchValue) -> TorchValue:
        pairs: list[tuple[Tensor, Tensor]] = []

        def gathered(x: Tensor) -> Tensor:
            pairs.append((x, gather(x)))
            return pairs[-1][1]

        out = map_tensors(gathered, inputs), map_tensors(gathered, named)
        watch.enter(pairs)
        return out

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(lambda *_: watch.leave(), always_call=True)


def _pack(saved: Tensor) -> Tensor | _SavedPart:
    found = _live.found.get(_address(saved))
    if found is None or found.whole._version != found.version:
        return saved
    with local_parts():
        spec = saved.spec if isinstance(saved, DistTensor) else None
        return _SavedPart(found.again, _View.by(saved), spec)


def _unpack(saved: Tensor | _SavedPart) -> Tensor:
    return saved.redeem() if isinstance(saved, _SavedPart) else saved


def _address(x: Tensor) -> int:
    with local_parts():
        return x.untyped_storage().data_ptr()
