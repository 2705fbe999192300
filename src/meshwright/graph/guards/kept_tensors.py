"""Tensors that a captured forward pass leaves in an attribute or a container, for which a program has no numbers.

A forward pass may keep a tensor to read it again in the same pass, such as the balance loss of a layer with experts. A
program computes it as any other value, but sets no attributes. So a `KeptTensor` takes its place there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .._errors import SideEffectError


class KeptTensor(Tensor):
    """A tensor without numbers at a place `label`; every use of it raises SideEffectError."""

    label: str

    @classmethod
    def at(cls, label: str) -> KeptTensor:
        made = Tensor._make_subclass(cls, torch.empty(0, device="cpu"))
        made.label = label
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., TorchValue],
        types: Sequence[type],
        args: Sequence[TorchValue] = (),
        kwargs: Mapping[str, TorchValue] | None = None,
    ) -> NoReturn:
        raise _used(next((x.label for x in args if isinstance(x, KeptTensor)), "an attribute"), func)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"a tensor that a forward pass left in {self.label}"

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptTensor:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[[str], KeptTensor], tuple[str]]:
        return KeptTensor.at, (self.label,)


def check_not_kept(values: Iterable[object], func: object) -> None:
    """Raise SideEffectError if one of the arguments of a call inside a capture is a KeptTensor."""
    for x in values:
        if isinstance(x, KeptTensor):
            raise _used(x.label, func)


def _used(label: str, func: object) -> SideEffectError:
    return SideEffectError(
        f"a use of {label} by {getattr(func, '__name__', func)}",
        f"a tensor that an earlier forward pass left in {label}",
        "a program is recorded once and sets no attributes, so the tensor would have the numbers of no step",
        "read it only in the pass that computes it; for later passes or for a log, write x.detach() to a buffer "
        "(register_buffer, copy_)",
    )
