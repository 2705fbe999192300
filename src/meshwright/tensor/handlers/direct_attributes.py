"""Attributes and methods of a tensor that need no rule, answered without interception.

Through `__torch_function__`, `x.dtype` of a distributed tensor takes 25 times as long as that of a plain tensor, so
the class answers directly. While interception is off, each answer is that of the local part. Calls such as
`torch.Tensor.size(x, 0)` still reach `__torch_function__`, which gives the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .._torch_call import TorchFunction
from ..autograd.graph_node import GraphNode, grad_fn
from ..core.absent_tensor import FakeAbsent
from ..core.computation_numbers import number_result
from ..core.dist_tensor import DistTensor, FakeDistTensor
from ..torch_hooks import (
    FakeTensor,
    backward_running,
    call_plain,
    function_modes,
    interception_on,
    jit_tracing,
    modes_active,
    seen_below_autograd,
    transforming,
)
from ..views.view_history import answer_for_views

_T: Any = Tensor
_TYPES = (DistTensor,)
_DETACH: TorchFunction = Tensor.detach
_NOTHING: dict[str, TorchValue] = {}

LOCAL = [
    "device", "is_cpu", "is_cuda", "is_hpu", "is_ipu", "is_leaf", "is_maia", "is_meta", "is_mkldnn", "is_mps",
    "is_mtia", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "layout",
    "output_nr", "requires_grad", "retains_grad",
]  # fmt: skip
"""Attributes that the local part has in common with the whole tensor."""


def _attribute_of_part(name: str) -> property:
    """Return a property that reads the attribute of the local part and sets it as torch does."""
    own = getattr(_T, name)
    get = own.__get__

    def answer(x: DistTensor) -> TorchValue:
        return call_plain(get, _TYPES, (x,), _NOTHING)

    return property(answer, own.__set__)


def _method_of_part(own: Callable[[Tensor], Any]) -> Callable[[DistTensor], Any]:
    """Return a function that calls the method on the local part."""

    def answer(x: DistTensor) -> TorchValue:
        return call_plain(own, _TYPES, (x,), _NOTHING)

    return answer


def _size(x: DistTensor, dim: int | None = None) -> torch.Size | int:
    if interception_on() and (backward_running() == -1 or not seen_below_autograd()):
        return x._spec.shape if dim is None else x._spec.shape[dim]
    return call_plain(_T.size, _TYPES, (x, dim), _NOTHING)


def _numel(x: DistTensor) -> int:
    if interception_on() and (backward_running() == -1 or not seen_below_autograd()):
        return x._spec.shape.numel()
    return call_plain(_T.numel, _TYPES, (x,), _NOTHING)


def _nbytes(x: DistTensor) -> int:
    return _numel(x) * x._spec.dtype.itemsize


def _dim(x: DistTensor) -> int:
    return len(x.shape)


def _is_floating_point(x: DistTensor) -> bool:
    return x._spec.dtype.is_floating_point


def _is_complex(x: DistTensor) -> bool:
    return x._spec.dtype.is_complex


def _is_signed(x: DistTensor) -> bool:
    return x._spec.dtype.is_signed


def _element_size(x: DistTensor) -> int:
    return x._spec.dtype.itemsize


def _grad_fn(x: DistTensor) -> GraphNode | None:
    return grad_fn(_T.grad_fn.__get__, _TYPES, (x,), _NOTHING)


def _requires_grad_(x: DistTensor, requires_grad: bool = True) -> DistTensor:
    return call_plain(_T.requires_grad_, _TYPES, (x, requires_grad), _NOTHING)


def _detach(x: DistTensor) -> Tensor:
    if (
        type(x) is not DistTensor
        or not interception_on()
        or transforming()
        or modes_active()
        or jit_tracing()
        or function_modes()
    ):
        return Tensor.detach(x)
    out: TorchValue = call_plain(_DETACH, _TYPES, (x,), _NOTHING)
    out.__class__ = DistTensor
    out._spec = x._spec
    number_result(_DETACH, x, out)
    return out


FREQUENT = [
    "backward", "chunk", "contiguous", "cumsum", "expand", "flatten", "mean", "permute", "repeat", "reshape", "softmax",
    "split", "squeeze", "sum", "transpose", "unflatten", "unsqueeze", "view",
]  # fmt: skip
"""Methods that programs call often, and that take no tensor of another class that could override them."""

OPERATORS = {"__add__": Tensor.add, "__sub__": Tensor.sub, "__mul__": Tensor.mul, "__matmul__": Tensor.matmul}
"""Binary operators of Python, and the functions that torch passes to `__torch_function__` for them."""

_OPERANDS = {"__matmul__": frozenset({DistTensor})}
_NUMBERS_TOO = frozenset({DistTensor, float, int})
"""Classes of operands for which an operator calls no code of torch; torch raises the errors for all others."""


def _without_override_check(own: Callable[..., TorchValue]) -> Callable[..., TorchValue]:
    """Return the method without torch's search for overrides, which takes 1 to 1.5 us."""

    @wraps(own)
    def method(x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        if interception_on() and not function_modes():
            return DistTensor.__torch_function__(own, _TYPES, (x, *args), kwargs)
        return own(x, *args, **kwargs)

    return method


def _operator_without_override_check(name: str, func: TorchFunction) -> Callable[..., TorchValue]:
    """Return a binary operator without torch's search for overrides."""
    own: Callable[..., TorchValue] = getattr(_T, name)
    operands = _OPERANDS.get(name, _NUMBERS_TOO)

    @wraps(own)
    def operator(x: Tensor, y: TorchValue) -> TorchValue:
        if type(y) in operands and interception_on() and not function_modes():
            return DistTensor.__torch_function__(func, _TYPES, (x, y), _NOTHING)
        return own(x, y)

    return operator


ANSWERS: dict[str, object] = {
    "dtype": property(attrgetter("_spec.dtype")),
    "itemsize": property(attrgetter("_spec.dtype.itemsize")),
    "ndim": property(_dim),
    "nbytes": property(_nbytes),
    "dim": property(attrgetter("_spec.shape.__len__")),
    "ndimension": property(attrgetter("_spec.shape.__len__")),
    "size": _size,
    "numel": _numel,
    "nelement": _numel,
    "is_floating_point": _is_floating_point,
    "is_complex": _is_complex,
    "is_signed": _is_signed,
    "element_size": _element_size,
    "get_device": _method_of_part(Tensor.get_device),
    "is_inference": _method_of_part(Tensor.is_inference),
    "is_conj": _method_of_part(Tensor.is_conj),
    "is_neg": _method_of_part(Tensor.is_neg),
    "grad_fn": property(_grad_fn),
    "requires_grad_": _requires_grad_,
    "detach": _detach,
    **{name: _without_override_check(getattr(_T, name)) for name in FREQUENT},
    **{name: _operator_without_override_check(name, func) for name, func in OPERATORS.items()},
    **{name: _attribute_of_part(name) for name in LOCAL if hasattr(Tensor, name)},
}
"""Name → the class attribute that answers. A property that returns a bound C method is a fast method."""

for _name, _answer in ANSWERS.items():
    setattr(DistTensor, _name, _answer)
answer_for_views()
for _class in (FakeDistTensor, FakeAbsent):  # a fake tensor has a device of its own
    for _name in vars(FakeTensor).keys() & ANSWERS.keys():
        setattr(_class, _name, vars(FakeTensor)[_name])
