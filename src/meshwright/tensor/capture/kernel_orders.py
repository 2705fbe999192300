"""Memory orders of results whose kernel differs from torch's meta kernel.

The strides of a result follow from the strides of the whole operands. Meta kernels give them, except for the operators
below: their kernels keep channels-last memory, or return contiguous tensors, where the meta kernels do not. The order
decides which elements dropout drops. tests/tensor/test_memory_order.py compares the table with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.layout import Strides, TorchValue, contiguous_strides, strides_like

from .._torch_call import Arguments
from ..torch_hooks import Operator, is_fake

Order = Callable[[Tensor, Arguments], Strides]
"""`order(result, arguments)` returns the strides of a result."""


def _contiguous(out: Tensor, args: Arguments) -> Strides:
    return contiguous_strides(out.shape)


def _format_of_first(out: Tensor, args: Arguments) -> Strides:
    """Return channels-last strides if the first argument is channels-last, else contiguous ones."""
    for form, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if args[0].dim() == out.dim() == dims and _is_in(args[0], form):
            return torch.empty(out.shape, device="meta").to(memory_format=form).stride()
    return contiguous_strides(out.shape)


def _is_in(x: Tensor, form: torch.memory_format) -> bool:
    """True if torch suggests this memory format for results of `x`, which may have gaps."""
    dense = torch.empty(x.shape, device="meta").as_strided(x.shape, strides_like(tuple(x.shape), x.stride()))
    return dense.is_contiguous(memory_format=form) and not dense.is_contiguous()


def _of_first(out: Tensor, args: Arguments) -> Strides:
    return strides_like(tuple(args[0].shape), args[0].stride())


def _without_overlap(out: Tensor, args: Arguments) -> Strides:
    """Return the strides of the first argument, or dense ones if its elements share memory."""
    return _of_first(out, args) if 0 in args[0].stride() else args[0].stride()


def _of_product(out: Tensor, args: Arguments) -> Strides:
    """Return the strides of the product of the first two arguments."""
    return (args[0] * args[1]).stride()


def _of_roll(out: Tensor, args: Arguments) -> Strides:
    """Return contiguous strides for a roll without dims, which rolls the flattened tensor."""
    return _format_of_first(out, args) if len(args) > 2 and args[2] else contiguous_strides(out.shape)


def _of_padding(out: Tensor, args: Arguments) -> Strides:
    """Return the strides of a padded tensor.

    Padding of three dims by reflection takes a tensor of four dims for one without a batch.
    """
    mode = args[2] if len(args) > 2 else "constant"
    return _format_of_first(out, args) if mode in ("reflect", "replicate") else out.stride()


_ORDERS: dict[str, Order] = {
    **dict.fromkeys(["channel_shuffle", "max_unpool2d", "pixel_shuffle"], _format_of_first),
    **dict.fromkeys(["batch_norm", "native_batch_norm", "_native_batch_norm_legit"], _format_of_first),
    **dict.fromkeys(["_batch_norm_with_update", "cudnn_batch_norm"], _format_of_first),
    **dict.fromkeys(["log_sigmoid", "rrelu", "isin", "poisson"], _contiguous),
    **dict.fromkeys(["copysign", "floor_divide", "xlogy", "special_xlogy", "special_xlog1py"], _of_product),
    **dict.fromkeys([f"{n}_scatter" for n in ("as_strided", "diagonal", "select", "slice")], _without_overlap),
    "roll": _of_roll,
    "normal": _contiguous,
    "div": _of_product,
    "divide": _of_product,
    "native_dropout_backward": _of_first,
    "index_fill": _of_first,
    "pad": _of_padding,
}
"""Name of an operator → the order of its first result. Overloads without tensor operands are not changed."""


def in_kernel_order(op: Operator, args: Arguments, out: TorchValue) -> TorchValue:
    """Return the meta results of an operator with the strides that its kernel gives the first one."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    order = _ORDERS.get(op._schema.name.removeprefix("aten::"))
    if order is None or not isinstance(first, Tensor) or is_fake(first) or not first.numel():
        return out
    if not args or not isinstance(args[0], Tensor) or any(first is a for a in args):
        return out
    if order is _of_product and not isinstance(args[1], Tensor):
        return out
    strides = order(first, args)
    if strides == first.stride():
        return out
    new = torch.empty_strided(first.shape, strides, dtype=first.dtype, device=first.device)
    return new if first is out else type(out)((new, *out[1:]))
