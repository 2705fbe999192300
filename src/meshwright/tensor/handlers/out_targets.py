"""Calls with `out=`: results are computed as without `out=`, and then written into the given tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.layout import TorchValue, warn_user

from .._errors import OperationError
from .._torch_call import TorchFunction
from ..conversion.local_parts import whole_local
from ..core.dist_tensor import DistTensor
from ..core.tree import map_tensors, tensors_in
from ..torch_hooks import Operator, OperatorPacket, parameters_of, written_arguments


def targets_in(func: TorchFunction, kwargs: dict[str, TorchValue]) -> list[str]:
    """Return the names of the given keyword arguments that only receive results; empty if they hold no tensor."""
    if not kwargs:
        return []
    names = _targets_of(func) if isinstance(func, Operator) else ["out"]
    names = [n for n in names if n in kwargs]
    return names if any(True for _ in tensors_in([kwargs[n] for n in names])) else []


def _targets_of(op: Operator) -> list[str]:
    return [a.name for a in written_arguments(op) if a.kwarg_only]


def into_targets(
    func: TorchFunction, args: TorchValue, kwargs: dict[str, TorchValue], names: Sequence[str]
) -> TorchValue:
    """Write the results of the call without `out=` into the targets; NotImplemented if the call itself has to run.

    A plain target of another shape is resized, as on one device. Raises OperationError if a distributed target has
    another shape than its result, before any target is written.
    """
    new = _results_alone(func, args, kwargs, names)
    if new is NotImplemented:
        return new
    targets, results = list(tensors_in([kwargs[n] for n in names])), list(tensors_in(new))
    if [t.dtype for t in targets] != [r.dtype for r in results]:
        return NotImplemented
    _check_shapes(func, targets, results)
    _check_gradients(func, targets, results)
    for target, result in zip(targets, results, strict=True):
        if target.shape != result.shape:
            _resize(target, result)
        target.copy_(_as_source_for(target, result))
    if _gives_nothing(func, kwargs[names[0]]):
        return None
    left = iter(targets)
    return map_tensors(lambda _: next(left), new)


def _results_alone(
    func: TorchFunction, args: TorchValue, kwargs: dict[str, TorchValue], names: Sequence[str]
) -> TorchValue:
    """Return the results of the call without its targets; NotImplemented if no function computes them alone."""
    plain = _without_targets(func)
    if plain is None:
        return NotImplemented
    others = {name: value for name, value in kwargs.items() if name not in names}
    return plain(*args, **_defaults(func, args, kwargs), **others)


def _without_targets(func: TorchFunction) -> Callable[..., TorchValue] | None:
    """Return the function that computes the results alone; None if there is none."""
    if _is_private(func):
        return None
    if not isinstance(func, Operator):
        return func
    targets, packet = _targets_of(func), func.overloadpacket
    if len(written_arguments(func)) > len(targets):
        return None
    wanted = parameters_of(func, without=targets)
    return next((o for o in _overloads(packet) if parameters_of(o) == wanted and not written_arguments(o)), None)


def _overloads(packet: OperatorPacket) -> list[Operator]:
    return [getattr(packet, name) for name in packet.overloads()]


def _is_private(func: TorchFunction) -> bool:
    """True for torch's internal functions: some, like `_compute_linear_combination`, add to the target's value."""
    return _name(func).startswith("_") and not _name(func).startswith("_foreach_")


def _defaults(func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> dict[str, TorchValue]:
    """Return the defaults of omitted arguments: the operator that computes the results may have no defaults."""
    if not isinstance(func, Operator):
        return {}
    left = func._schema.arguments[len(args) :]
    return {a.name: a.default_value for a in left if a.name not in kwargs and a.has_default_value()}


def _gives_nothing(func: TorchFunction, target: TorchValue) -> bool:
    """True for an operator without results, such as those that fill a list of tensors."""
    if isinstance(func, Operator):
        return not func._schema.returns
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if packet is None or not isinstance(target, (list, tuple)):
        return False
    return any(_targets_of(o) == ["out"] and not o._schema.returns for o in _overloads(packet))


def _as_source_for(target: Tensor, result: Tensor) -> Tensor:
    """Return the result as `target.copy_` takes it: whole and plain for a plain target."""
    return result if isinstance(target, DistTensor) or not isinstance(result, DistTensor) else whole_local(result)


def _resize(target: Tensor, result: Tensor) -> None:
    """Give a plain target the shape and the strides of its result, with the warning of one device."""
    if target.numel():
        warn_user(
            f"An output with one or more elements was resized since it had shape {list(target.shape)}, which does not "
            f"match the required output shape {list(result.shape)}. Pass an output without elements, or of this shape",
            UserWarning,
        )
    target.resize_(result.shape)
    if isinstance(result, DistTensor) and result._spec.is_dense:
        target.as_strided_(result.shape, result._spec.full_strides)


def _check_shapes(func: TorchFunction, targets: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    for target, result in zip(targets, results, strict=True):
        if target.shape != result.shape and isinstance(target, DistTensor):
            raise OperationError(
                f"{_name(func)} with out=",
                f"out is {target._spec!r}, the result has shape {tuple(result.shape)}",
                "a distributed tensor keeps its shape",
                "pass out= of the result's shape, or omit out=",
            )


def _check_gradients(func: TorchFunction, targets: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Raise the error that torch raises on one device."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*targets, *results)):
        raise RuntimeError(
            f"{_name(func)}(): functions with out=... arguments don't support automatic differentiation, but one of "
            "the arguments requires grad."
        )


def _name(func: TorchFunction) -> str:
    return str(getattr(func, "__name__", func))
