"""Names of functions that need no replacement, and the gradients of operands that broadcast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .functions import refusal, spread

BROADCASTING = frozenset(
    "add sub mul div true_divide rsub rdiv radd rmul rtruediv where maximum minimum pow rpow masked_fill "
    "add_ sub_ mul_ div_ iadd isub imul itruediv".split()
)
"""Exact elementwise functions of several tensors. The gradient of an operand that broadcasts is a sum."""

EXACT = frozenset(
    """
    neg abs sign exp log log1p sqrt sin cos tanh erf relu square reciprocal clamp clamp_min clamp_max clip floor ceil
    round trunc to float double half bfloat16 type type_as contiguous clone detach detach_ isnan isinf isfinite
    isneginf isposinf nan_to_num lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ sqrt_ neg_ exp_ zero_ fill_ copy_ clamp_
    masked_fill_ logical_and logical_or logical_not
    amax amin max min argmax argmin any all topk sort argsort isin equal allclose isclose
    view reshape flatten unflatten permute transpose t unsqueeze squeeze select narrow split chunk unbind cat concat
    concatenate stack hstack vstack roll flip tril triu diagonal movedim swapaxes swapdims view_as reshape_as pad
    gather index_select take_along_dim tensor_split split_with_sizes unfold getitem setitem index_copy_ repeat_interleave
    requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook backward item tolist numpy cpu numel dim
    size stride storage_offset data_ptr is_contiguous element_size nelement is_floating_point is_complex is_same_size
    get_device len repr format bool int hash deepcopy reduce_ex iter reversed dlpack array untyped_storage
    zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor
    dropout normal_ uniform_ bernoulli_ bernoulli multinomial to_local redistribute
    _foreach_mul_ _foreach_add_ _foreach_zero_ is_inference is_shared pin_memory is_pinned has_names
    """.split()
)
"""Functions each element of whose result depends on the same operands on every mesh, and whose gradients do too."""


def name_of(func: Any) -> str:
    """Return the name of a function, without the underscores of a special method."""
    name = getattr(func, "__name__", str(func))
    return name.strip("_") if name.startswith("__") else name


def is_attribute(func: Any) -> bool:
    return name_of(func) in ("get", "set", "delete")


def operands_that_broadcast(name: str, args: TorchValue) -> TorchValue:
    """Return the arguments of an elementwise function with operands whose gradients are sums in a fixed order."""
    if not torch.is_grad_enabled() or name == "masked_fill":
        return args
    tensors = [x for x in args if isinstance(x, Tensor)]
    if len(tensors) < 2 or not any(x.requires_grad for x in tensors):
        return args
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    smaller = [x for x in tensors if x.shape != shape and x.requires_grad]
    if not smaller:
        return args
    if name.endswith("_") or name.startswith("i"):
        raise refusal(f"{name} of an operand that broadcasts", "the gradient of the operand is a sum")
    like = next((x for x in tensors if x.shape == shape), None)
    full = smaller[0].detach().expand(shape) if like is None else like.detach()
    return tuple(spread(x, full) if any(x is s for s in smaller) else x for x in args)


def check_exact(name: str, args: TorchValue, kwargs: TorchValue) -> None:
    """Raise SameNumbersError for a call that rounds in an order that may depend on the mesh."""
    alpha = kwargs.get("alpha", 1)
    if alpha != 1 and any(isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) for x in args):
        raise refusal(f"{name} with alpha in half precision", "kernels round it in two ways")
    if name == "repeat_interleave" and isinstance(args[0], Tensor) and args[0].requires_grad:
        raise refusal(name, "the gradient of a repeated element is a sum")


def is_of_numbers(values: TorchValue) -> bool:
    """True if a floating-point tensor is among the values."""
    return any(isinstance(x, Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex) for x in _flat(values))


def _flat(values: TorchValue) -> list[TorchValue]:
    found: list[TorchValue] = []
    for x in values:
        found += _flat(x) if isinstance(x, (list, tuple)) else [x]
    return found
