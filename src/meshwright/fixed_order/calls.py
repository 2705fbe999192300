"""Functions that need no replacement, and the gradients of operands that broadcast.

An element of the result of such a function depends on the same operands on every mesh, and is rounded in the same way
wherever it is in memory. Functions that are not known are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue
from meshwright.tensor import DistTensor, leaves_in

from ._errors import refusal
from .functions import spread

BROADCASTING = frozenset(
    """
    add sub mul div true_divide radd rsub rmul rdiv iadd isub imul itruediv add_ sub_ mul_ div_ maximum minimum max min
    where masked_fill masked_fill_ lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ clamp clamp_ clamp_min clamp_max clip
    copy_ fill_
    """.split()
)
"""Exact elementwise functions of several tensors. The gradient of an operand that broadcasts is a sum."""

EXACT = frozenset(
    """
    neg abs sign exp log log1p sqrt sin cos tanh erf relu square reciprocal floor ceil round trunc to float double half
    bfloat16 long short type type_as contiguous clone detach detach_ isnan isinf isfinite isneginf isposinf nan_to_num
    nextafter resolve_conj resolve_neg sqrt_ neg_ exp_ reciprocal_ zero_
    logical_and logical_or logical_not amax amin argmax argmin any all topk sort argsort
    isin equal allclose isclose eq ne lt le gt ge view reshape flatten unflatten permute transpose t unsqueeze squeeze
    select narrow split chunk unbind cat concat concatenate stack hstack vstack roll flip tril triu diagonal movedim
    swapaxes swapdims view_as reshape_as pad cumsum gather index_select take_along_dim repeat_interleave repeat tile
    tensor_split split_with_sizes getitem setitem index_copy_ requires_grad_ retain_grad register_hook
    register_post_accumulate_grad_hook item tolist numpy cpu numel dim size stride storage_offset data_ptr
    is_contiguous element_size nelement is_floating_point is_complex is_same_size get_device len repr format bool int
    deepcopy reduce_ex iter array untyped_storage zeros_like ones_like empty_like full_like rand_like randn_like
    new_zeros new_ones new_empty new_full new_tensor dropout normal_ uniform_ bernoulli_ bernoulli multinomial
    _foreach_mul_ _foreach_add_ _foreach_zero_ is_inference
    """.split()
)
"""Functions without sums, whose gradients have none for most arguments (`GRADIENTS`)."""

ATTRIBUTES = frozenset({"get", "set", "delete"})
"""Access to attributes of a tensor."""

BACKWARD = frozenset({"backward", "grad"})
"""Functions that run a backward pass."""


@lru_cache(maxsize=1024)
def name_of(func: Any) -> str:
    """Return the name of a function, without the underscores of a special method."""
    name = getattr(func, "__name__", str(func))
    return name.strip("_") if name.startswith("__") else name


def spread_operands(name: str, args: TorchValue, kwargs: TorchValue) -> tuple[TorchValue, TorchValue]:
    """Return the arguments of an elementwise function, with operands whose gradients are sums in a fixed order.

    Raises SameNumbersError for a call that writes to such an operand, or to a tensor beside it.
    """
    if not torch.is_grad_enabled():
        return args, kwargs
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    shape = _shape_with_sums(tensors)
    if shape is None:
        return args, kwargs
    if name.endswith("_") or name in ("iadd", "isub", "imul", "itruediv"):
        raise refusal(f"{name} with an operand that broadcasts", "a write has no form with a gradient in a fixed order")
    like = next((x for x in tensors if x.shape == shape), tensors[0].detach().expand(shape)).detach()

    def spread_one(x: TorchValue) -> TorchValue:
        return spread(x, like) if isinstance(x, Tensor) and x.requires_grad else x

    return tuple(map(spread_one, args)), {key: spread_one(x) for key, x in kwargs.items()}


def _shape_with_sums(tensors: Sequence[Tensor]) -> torch.Size | None:
    """Return the shape to which the operands broadcast; None if no gradient is a sum."""
    if all(x.shape == tensors[0].shape for x in tensors):
        return None
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return shape if any(x.requires_grad and x.shape != shape for x in tensors) else None


def check_exact(name: str, args: TorchValue, kwargs: TorchValue) -> None:
    """Raise SameNumbersError for arguments with which a known function has a sum, or rounds in several ways."""
    if "alpha" in kwargs and not _is_alpha_exact(args, kwargs):
        raise refusal(f"{name} with alpha, of a number or in half precision", "kernels round it in several ways")
    if name == "cumsum" and any(isinstance(x, DistTensor) or x.requires_grad for x in _floats(args)):
        raise refusal("cumsum of a distributed tensor, or with a gradient", "it is a sum without a fixed order")
    if kwargs.get("create_graph"):
        raise refusal(f"{name} with create_graph", "gradients of gradients have no fixed order yet")
    check = GRADIENTS.get(name) if torch.is_grad_enabled() else None
    if check is None:
        return
    does_sum, why = check
    if does_sum(*args, **kwargs):
        raise refusal(name, why)


def _is_alpha_exact(args: TorchValue, kwargs: TorchValue) -> bool:
    """True if kernels round a sum with this `alpha` in one way. A symbol of a recording must not be compared."""
    return all(map(_is_full_precision, leaves_in((args, kwargs.get("other", ()))))) or kwargs["alpha"] == 1


def _repeats(input: TorchValue, *index: TorchValue, **named: TorchValue) -> bool:
    """True if a call that reads elements by numbers may read one twice."""
    return _has_gradient(input) and any(map(_may_repeat, leaves_in((index, named))))


def _key_repeats(x: TorchValue, key: TorchValue) -> bool:
    """True if `x[key]` may read an element twice."""
    parts = key if isinstance(key, tuple) else (key,)
    return _has_gradient(x) and any(map(_may_repeat, parts))


def _may_repeat(index: TorchValue) -> bool:
    if isinstance(index, Tensor):
        return index.dtype != torch.bool and index.numel() > 1
    return not isinstance(index, (int, slice, EllipsisType, NoneType))


def _gather_repeats(input: TorchValue, dim: int, index: Tensor, **named: TorchValue) -> bool:
    return _has_gradient(input) and index.shape[dim] != 1


def _padding_repeats(input: TorchValue, pad: TorchValue, mode: str = "constant", value: TorchValue = None) -> bool:
    return _has_gradient(input) and mode != "constant"


def _written_spreads(x: Tensor, key: TorchValue, value: TorchValue) -> bool:
    """True if `x[key] = value` writes an element of `value` twice."""
    return _has_gradient(value) and value.shape != x.detach()[key].shape


def _filling_has_gradient(input: TorchValue, mask: TorchValue, value: TorchValue) -> bool:
    return _has_gradient(value)


def _is_graded(input: TorchValue, *rest: TorchValue, **named: TorchValue) -> bool:
    return _has_gradient(input)


def _is_of_all(input: TorchValue, *rest: TorchValue, **named: TorchValue) -> bool:
    """True for the `max` of all elements, not along a dim, and not of two tensors."""
    return not rest and not named and _has_gradient(input)


_READ_TWICE = "the gradient of an element that is read twice is a sum"
_TIES = "the gradient is divided among equal elements; max and min along a dim have a gradient in a fixed order"
GRADIENTS: dict[str, tuple[Callable[..., bool], str]] = {
    "getitem": (_key_repeats, _READ_TWICE),
    "gather": (_gather_repeats, _READ_TWICE),
    "index_select": (_repeats, _READ_TWICE),
    "take_along_dim": (_repeats, _READ_TWICE),
    "repeat_interleave": (_is_graded, _READ_TWICE),
    "repeat": (_is_graded, _READ_TWICE),
    "tile": (_is_graded, _READ_TWICE),
    "pad": (_padding_repeats, "the gradient of an element that is repeated is a sum"),
    "setitem": (_written_spreads, "the gradient of an element that is written twice is a sum"),
    "masked_fill": (_filling_has_gradient, "the gradient of the number is a sum; write torch.where"),
    "masked_fill_": (_filling_has_gradient, "the gradient of the number is a sum; write torch.where"),
    "amax": (_is_graded, _TIES),
    "amin": (_is_graded, _TIES),
    "max": (_is_of_all, _TIES),
    "min": (_is_of_all, _TIES),
}
"""Function whose gradient may have a sum → whether a call has one, and why."""


def _has_gradient(x: TorchValue) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _is_full_precision(x: TorchValue) -> bool:
    return isinstance(x, Tensor) and x.dtype not in (torch.bfloat16, torch.float16)


def is_of_numbers(args: TorchValue, kwargs: Mapping[str, TorchValue]) -> bool:
    """True if a tensor of floating-point numbers is among the arguments."""
    return any(True for _ in _floats(args, kwargs))


def _floats(*values: TorchValue) -> Iterator[Tensor]:
    tensors = (x for x in leaves_in(values) if isinstance(x, Tensor))
    return (x for x in tensors if x.dtype.is_floating_point or x.dtype.is_complex)
