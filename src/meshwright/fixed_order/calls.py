"""Functions that need no replacement, and the gradients of operands that broadcast.

An element of the result of such a function depends on the same operands on every mesh, and is rounded in the same way
wherever it is in memory. Functions that are not known are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    where pow masked_fill masked_fill_ lerp lerp_ addcmul addcmul_ addcdiv addcdiv_
    """.split()
)
"""Exact elementwise functions of several tensors. The gradient of an operand that broadcasts is a sum."""

EXACT = frozenset(
    """
    neg abs sign exp log log1p sqrt sin cos tanh erf relu square reciprocal clamp clamp_min clamp_max clip floor ceil
    round trunc to float double half bfloat16 type type_as contiguous clone detach detach_ isnan isinf isfinite
    isneginf isposinf nan_to_num sqrt_ neg_ exp_ zero_ fill_ copy_ clamp_ logical_and logical_or logical_not
    amax amin argmax argmin any all topk sort argsort isin equal allclose isclose eq ne lt le gt ge
    view reshape flatten unflatten permute transpose t unsqueeze squeeze select narrow split chunk unbind cat concat
    concatenate stack hstack vstack roll flip tril triu diagonal movedim swapaxes swapdims view_as reshape_as pad
    cumsum gather index_select take_along_dim tensor_split split_with_sizes getitem setitem index_copy_
    requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook item tolist numpy cpu numel dim
    size stride storage_offset data_ptr is_contiguous element_size nelement is_floating_point is_complex is_same_size
    get_device len repr format bool int deepcopy reduce_ex iter array untyped_storage
    zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor
    dropout normal_ uniform_ bernoulli_ bernoulli multinomial _foreach_mul_ _foreach_add_ _foreach_zero_ is_inference
    """.split()
)
"""Functions without sums, whose gradients have none for most arguments (`SUMMING`)."""

BACKWARD = frozenset({"backward", "grad"})
"""Functions that run a backward pass."""

EXPONENTS = (0.5, 1, 2, 3)
"""Exponents for which kernels of `pow` round all elements alike."""


def name_of(func: Any) -> str:
    """Return the name of a function, without the underscores of a special method."""
    name = getattr(func, "__name__", str(func))
    return name.strip("_") if name.startswith("__") else name


def is_attribute(func: Any) -> bool:
    """True for access to an attribute of a tensor."""
    return name_of(func) in ("get", "set", "delete")


def spread_operands(name: str, args: TorchValue, kwargs: TorchValue) -> tuple[TorchValue, TorchValue]:
    """Return the arguments of an elementwise function, with operands whose gradients are sums in a fixed order.

    Raises SameNumbersError for a call that writes to such an operand, or to a tensor beside it.
    """
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
    if len(tensors) < 2 or not torch.is_grad_enabled():
        return None
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return shape if any(x.requires_grad and x.shape != shape for x in tensors) else None


def check_exact(name: str, args: TorchValue, kwargs: TorchValue) -> None:
    """Raise SameNumbersError for arguments with which a known function has a sum, or rounds in several ways."""
    if name in ("pow", "rpow") and not _is_exact_power(name, args, kwargs):
        raise refusal(f"{name} with this exponent", "kernels round it in several ways; 0.5, 1, 2 and 3 are exact")
    if any(_is_half(x) for x in args) and kwargs.get("alpha", 1) != 1:  # a learning rate may be symbolic
        raise refusal(f"{name} with alpha in half precision", "kernels round it in several ways")
    if name == "cumsum" and any(isinstance(x, DistTensor) or x.requires_grad for x in _tensors(args)):
        raise refusal("cumsum of a distributed tensor, or with a gradient", "it is a sum without a fixed order")
    why = SUMMING.get(name)
    if why is not None and torch.is_grad_enabled() and _sums_gradient(name, args, kwargs):
        raise refusal(name, why)


def _is_exact_power(name: str, args: TorchValue, kwargs: TorchValue) -> bool:
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    return name == "pow" and isinstance(exponent, (int, float)) and exponent in EXPONENTS


SUMMING = dict.fromkeys(
    ("getitem", "gather", "index_select", "take_along_dim"), "the gradient of an element that is read twice is a sum"
) | {"pad": "the gradient of an element that is repeated is a sum"}
"""Function whose gradient may have a sum → why."""


def _sums_gradient(name: str, args: TorchValue, kwargs: TorchValue) -> bool:
    """True if the gradient of the first operand may add up elements."""
    x, *rest = args
    if not isinstance(x, Tensor) or not x.requires_grad:
        return False
    if name == "pad":
        return (rest[1] if len(rest) > 1 else kwargs.get("mode", "constant")) != "constant"
    if name == "gather" and len(rest) > 1:
        return rest[1].shape[rest[0]] != 1
    indices = [i for i in leaves_in((rest, kwargs)) if isinstance(i, Tensor)]
    return any(i.dtype != torch.bool and i.numel() > 1 for i in indices)


def _is_half(x: TorchValue) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)


def is_of_numbers(args: TorchValue, kwargs: Mapping[str, TorchValue]) -> bool:
    """True if a tensor of floating-point numbers is among the arguments."""
    return any(x.dtype.is_floating_point or x.dtype.is_complex for x in _tensors(args, kwargs))


def _tensors(*values: TorchValue) -> Iterator[Tensor]:
    return (x for x in leaves_in(values) if isinstance(x, Tensor))
