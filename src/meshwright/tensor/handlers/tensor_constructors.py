"""C++ functions that read the elements of a tensor without calling `__torch_function__`.

`torch.tensor(x)` copies memory, `torch.full((2,), x)` reads a number, and `p.data = x` takes over memory. Each of them
would read this rank's part. Functions that make a tensor are passed to the handlers below. Functions that read a number
all call one operator, and this operator is guarded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils import dlpack

from meshwright.layout import TorchValue

from .._errors import MemoryAccessError
from .._torch_call import TorchFunction
from ..autograd.intercepted_call import argument_at, named_arguments
from ..conversion.python_values import gather_everywhere
from ..core.dist_tensor import DistTensor, as_part, plain_view
from ..torch_hooks import Operator, backward_running, no_interception, offer_call
from ..views.gathered_memory import holds_whole
from .memory_access import refusal
from .out_targets import into_targets
from .tensor_attributes import takes_memory
from .torch_hooks import guard_operator, guard_set_data, offer_set, read_number


def _copied(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the result of `torch.tensor(x, ...)`: a leaf with a copy of the value, in the layout of `x`."""
    x = _data(args, kwargs)
    return NotImplemented if x is None else _converted(x, kwargs)


def _data(args: TorchValue, kwargs: TorchValue) -> DistTensor | None:
    """Return the first argument of a constructor if it is a distributed tensor, else None."""
    x = argument_at(args, kwargs, 0, "data", "obj")
    return x if isinstance(x, DistTensor) else None


def _converted(x: DistTensor, given: dict[str, TorchValue]) -> Tensor:
    out = x.detach().clone().to(**_target(given))
    return out.requires_grad_(bool(given.get("requires_grad")))


def _target(given: dict[str, TorchValue]) -> dict[str, TorchValue]:
    """Return the keyword arguments `dtype` and `device` that are given and not None."""
    return {name: given[name] for name in ("dtype", "device") if given.get(name) is not None}


def _copied_like(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the result of `like.new_tensor(x, ...)`: that of `torch.tensor`, on the device of `like`."""
    x = _data(args[1:], kwargs)
    return NotImplemented if x is None else _converted(x, {"device": args[0].device, **kwargs})


def _taken(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the result of `torch.as_tensor(x, ...)`: `x` itself, unless the dtype or device differs."""
    x = _data(args, kwargs)
    if x is None:
        return NotImplemented
    given = named_arguments(("dtype", "device"), args[1:], kwargs)
    return x.to(**_target(given)) if _target(given) else x


def _as_array(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the result of `torch.asarray(x, ...)`: the same memory, unless it has to be a copy.

    A copy is made if `copy` is True, or if the dtype or device differs.
    """
    x, wanted = _data(args, kwargs), bool(kwargs.get("requires_grad"))
    if x is None:
        return NotImplemented
    new: Tensor = x.to(**_target(kwargs)) if _target(kwargs) else x
    if kwargs.get("copy") and new is x:
        new = x.clone()
    if kwargs.get("copy") is False and new is not x:
        raise ValueError("can't alias tensor of another dtype or device")  # as torch does
    new = new if wanted or not new.requires_grad else new.detach()
    return new.requires_grad_() if wanted else new


def _exported(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return a DLPack capsule of the memory; a consumer's writes to a gathered copy would be lost."""
    x = args[0] if args else kwargs.pop("tensor")
    if not isinstance(x, DistTensor):
        return own(x, *args[1:], **kwargs)
    if not holds_whole(x):
        raise refusal("to_dlpack of a distributed tensor", x, "call from_dlpack(x, copy=True) for a copy")
    with no_interception():
        return own(plain_view(x), *args[1:], **kwargs)


def _filled(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return `torch.range(..., out=x)`: the numbers, written into `x`."""
    return into_targets(own, args, kwargs, ["out"]) if isinstance(kwargs.get("out"), DistTensor) else NotImplemented


def _refused(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    found = next((a for a in (*args, *kwargs.values()) if isinstance(a, DistTensor)), None)
    if found is None:
        return NotImplemented
    raise refusal(f"{own.__name__} of a distributed tensor", found, "use x.detach(), which stays distributed")


def _memory_taken(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Do `x.set_(source)` as `x.data = source`, for a distributed `x` and a tensor of the same dtype; return `x`.

    This happens outside of the operator, because tensors that are made inside of it share no version counters.
    """
    x, source = args[0], args[1] if len(args) == 2 else kwargs.get("source")
    if not isinstance(x, DistTensor) or not isinstance(source, Tensor) or x.dtype != source.dtype:
        return NotImplemented
    if not (isinstance(source, DistTensor) and takes_memory(x, source)):
        x.data = source
    return x


OFFERED: list[tuple[object, str, Callable[..., TorchValue]]] = [
    (torch, "tensor", _copied),
    (torch, "as_tensor", _taken),
    (torch, "asarray", _as_array),
    (torch, "range", _filled),
    (torch.Tensor, "new_tensor", _copied_like),
    (torch.Tensor, "set_", _memory_taken),
    (torch.Tensor, "_make_subclass", _refused),
    (dlpack, "to_dlpack", _exported),
    (torch, "to_dlpack", _exported),
]
"""C++ constructors that never call `__torch_function__`: (owner, attribute name, handler)."""

for _owner, _name, _handler in OFFERED:
    offer_call(_owner, _name, _handler)


def _copied_into(name: str) -> Callable[[Tensor, TorchValue], bool]:
    """Return a handler of `x.real = new` or `x.imag = new`, which copies `new` into that part of `x`."""

    def copy(x: Tensor, new: TorchValue) -> bool:
        given = isinstance(x, DistTensor) or isinstance(new, DistTensor)
        if given:
            getattr(x, name).copy_(new)
        return given

    return copy


for _name in ("real", "imag"):
    offer_set(_name, _copied_into(_name))


def _number(op: Operator, args: TorchValue, run: Callable[..., TorchValue]) -> TorchValue:
    """Return the number that the whole tensor holds, on every rank."""
    x = args[0]
    if not isinstance(x, DistTensor):
        return run(x)
    whole = gather_everywhere(x)
    with no_interception():
        return whole.item()


def _aliased(op: Operator, args: TorchValue, run: Callable[..., TorchValue]) -> TorchValue:
    """Raise MemoryAccessError for `torch.Tensor(x)` and `plain.new(x)`.

    They make a plain tensor on the memory of `x`.
    """
    if isinstance(args[0], DistTensor) and backward_running() == -1:  # autograd aliases local parts
        asked = "torch.Tensor(x), or a legacy constructor like it"
        raise refusal(asked, args[0], "use x.detach() or torch.tensor(x)")
    return run(*args)


def _set(op: Operator, args: TorchValue, run: Callable[..., TorchValue]) -> TorchValue:
    """Return `x.set_(source)` of plain tensors and storages; raise MemoryAccessError if one is distributed."""
    if isinstance(args[0], DistTensor):
        raise refusal("Tensor.set_", args[0], "write x.data = new or x.copy_(new), or make a new tensor")
    if len(args) > 1 and isinstance(args[1], DistTensor):
        raise refusal("Tensor.set_ of a plain tensor", args[1], "write plain.data = x, which makes it distributed")
    return run(*args)


guard_operator(read_number, _number)
for _overload in torch.ops.aten.set_.overloads():
    guard_operator(getattr(torch.ops.aten.set_, _overload), _set)
guard_operator(torch.ops.aten.alias.default, _aliased)


def _takes_data(x: Tensor, new: Tensor) -> None:
    """Make the plain tensor `x` distributed before `x.data = new`, if `new` is distributed.

    torch then puts the part of `new` into `x`.
    """
    if not isinstance(new, DistTensor) or isinstance(x, DistTensor):
        return
    if x.grad_fn is not None or x.grad is not None:
        raise MemoryAccessError(
            "x.data = y with a distributed y",
            f"a plain x {'with a gradient' if x.grad is not None else 'computed'}",
            "the gradient of x belongs to a whole tensor, and x would become a part",
            "set x.grad = None first if x is a parameter; write x = y if x is a computed value",
        )
    is_parameter = isinstance(x, nn.Parameter)
    out = as_part(x, new._spec)
    if new._away:
        out.__class__ = type(new)
    if is_parameter:
        out._is_param = True


guard_set_data(_takes_data)
