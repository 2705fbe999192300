"""Plans of calls on local tensors: classes whose method `run` carries out the calls with one signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Spec, TorchValue

from .._errors import OperationError
from .._torch_call import TorchFunction
from ..autograd.user_functions import plain_are_whole, plain_may_be_part
from ..capture.call_capture import Captured, CapturedNode, autocast_dtype, strides_of
from ..capture.trial_calls import is_raised
from ..conversion.convert import Move, convert_local
from ..conversion.local_parts import shared_move, write_into
from ..core.computation_numbers import note_drawing
from ..core.dist_tensor import DistTensor, as_part, plain_view, wants_grad
from ..core.tree import map_leaves, map_tensors, tensors_in
from ..planning.call_plan import SETTING, NestedCalls, Step
from ..planning.result_checks import ResultRequirements, with_argument_views
from ..torch_hooks import (
    Operator,
    OperatorPacket,
    call_plain,
    no_interception,
    no_modes,
    parameters_of,
    view_replay,
    written_arguments,
)
from ..views.dist_view import break_view, run_whole
from ..views.view_checks import check_own_elements
from .few_row_products import linear, products_are_fast

_NOTHING: dict[str, TorchValue] = {}


class CallPlan:
    """The plan of the calls with one signature; `PLANS` stores its method `run`."""

    __slots__ = ()

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        """Return the result of a call; each class of plans carries it out in its own way."""
        raise NotImplementedError

    @property
    def settled(self) -> CallPlan:
        """The plan to keep after a first call."""
        return self


@dataclass(frozen=True, slots=True)
class DirectCall(CallPlan):
    """A call that is correct on local tensors: the function is called, and its results are stamped.

    The function may return a plain argument itself. `flat` is True if all tensors are positional arguments.
    """

    outs: Sequence[Spec]
    requirements: ResultRequirements
    flat: bool

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        found = call_plain(func, types, args, kwargs or _NOTHING)
        with no_interception():
            found = self.requirements.apply(found, args if self.flat else list(tensors_in((args, kwargs))))
        return _stamp_all(found, self.outs)


@dataclass(frozen=True, slots=True)
class OneResultCall(CallPlan):
    """A direct call of distributed tensors with one result, which needs no more checks."""

    spec: Spec

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        out: TorchValue = call_plain(func, types, args, kwargs or _NOTHING)
        spec = self.spec
        if type(out) is not Tensor:
            return as_part(out, _with_dtype_of(spec, out))
        if out.dtype is not spec.dtype:
            return as_part(out, spec.with_dtype(out.dtype))
        out.__class__ = DistTensor
        out._spec = spec  # pyright: ignore[reportAttributeAccessIssue] - by its new class
        return out


@dataclass(frozen=True, slots=True)
class LinearCall(CallPlan):
    """A call of a linear layer, whose product may be computed by a faster kernel than torch's."""

    plan: CallPlan

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        return self.plan.run(linear if products_are_fast() else func, types, args, kwargs)

    @property
    def settled(self) -> CallPlan:
        settled = self.plan.settled
        return self if settled is self.plan else LinearCall(settled)


@dataclass(frozen=True, slots=True)
class UnsettledCall(CallPlan):
    """A call with one result, before its first results were checked."""

    checked: DirectCall | PositionalOperands
    unchecked: OneResultCall | OneConvertedOperand

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        plan = self.unchecked if self.checked.requirements.is_plain else self.checked
        return plan.run(func, types, args, kwargs)

    @property
    def settled(self) -> CallPlan:
        if self.checked.requirements.is_plain:
            return self.unchecked
        return self.checked if self.checked.requirements.settled else self


def plan_direct(
    outs: Sequence[Spec], out: TorchValue, args: TorchValue, kwargs: TorchValue, requirements: ResultRequirements
) -> CallPlan:
    """Return the plan of a call that is correct on local tensors; `out` is its captured result."""
    plan = DirectCall(outs, requirements, flat=not kwargs and _tensor_places(args, kwargs) is not None)
    return UnsettledCall(plan, OneResultCall(outs[0])) if _has_one_result(out, args) else plan


def _stamp_all(out: TorchValue, specs: Sequence[Spec]) -> TorchValue:
    left = iter(specs)
    return map_tensors(lambda t: as_part(t, _with_dtype_of(next(left), t)), out)


def _with_dtype_of(spec: Spec, t: Tensor) -> Spec:
    """Return `spec` with the dtype of a new local tensor, which autocast may have chosen."""
    return spec if isinstance(t, DistTensor) or t.dtype is spec.dtype else spec.with_dtype(t.dtype)


def plan_step(step: Step, func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> CallPlan:
    """Return the plan of one operator: convert its operands, then call the caller's function, operator or form."""
    plan = _plan_operator(step, func, args, kwargs)
    return LinearCall(plan) if func is F.linear and step.direct else plan


def _plan_operator(step: Step, func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> CallPlan:
    places = _tensor_places(args, kwargs)
    requirements = ResultRequirements(step.node.op.name(), step.outs, step.fresh)
    if step.node.op.namespace != "aten":
        return ForeignOperator(step, places, requirements, _finisher(step))
    if step.direct and not step.moves:
        return plan_direct(step.outs, step.node.out, args, kwargs, requirements)
    if step.direct:
        return _plan_converted(step, places, args, kwargs, requirements)
    if not step.moves and step.broken is None and func in _SIZED and type(args[0]) is DistTensor:
        return SizedCall(step.outs[0], _SIZED[func], requirements, _finisher(step))
    return LocalForm(step, places, requirements, _finisher(step), _in_float32(step))


def _plan_converted(
    step: Step,
    places: tuple[int, ...] | None,
    args: TorchValue,
    kwargs: TorchValue,
    requirements: ResultRequirements,
) -> CallPlan:
    """Return the plan of a call of the caller's function with converted operands."""
    finish = _finisher(step)
    if places is None:
        return NestedOperands(step, places, requirements, finish)
    moves = tuple((places[at], move) for at, move in step.moves)
    if kwargs:
        return NamedOperands(moves, requirements, finish)
    plan = PositionalOperands(moves, requirements, finish)
    at, move = moves[0]
    if len(moves) > 1 or step.broken is not None or not _has_one_result(step.node.out, [*args[:at], *args[at + 1 :]]):
        return plan
    return UnsettledCall(plan, OneConvertedOperand(at, move, step.outs[0]))


def _has_one_result(out: TorchValue, args: TorchValue) -> bool:
    """True if the call has one result, and all tensors among `args` are distributed."""
    return isinstance(out, Tensor) and all(isinstance(t, DistTensor) for t in tensors_in(args))


def _tensor_places(args: TorchValue, kwargs: TorchValue) -> tuple[int, ...] | None:
    """Return the indices of the call's tensors among its arguments, keyword arguments last.

    None if a tensor is nested.
    """
    found = tuple(at for at, a in enumerate((*args, *kwargs.values())) if isinstance(a, Tensor))
    return found if len(found) == len(list(tensors_in((args, kwargs)))) else None


def _converted_tensors(
    step: Step, places: tuple[int, ...] | None, args: TorchValue, kwargs: TorchValue
) -> list[Tensor]:
    """Return the call's tensor arguments, converted as the operator needs them."""
    values = [*args, *kwargs.values()] if kwargs else args
    tensors = list(tensors_in(values)) if places is None else [values[at] for at in places]
    exact = step.form is None
    for at, move in step.moves:
        tensors[at] = shared_move(tensors[at], move, exact)
    return tensors


Finish = Callable[[TorchValue, TorchFunction, TorchValue, TorchValue], TorchValue]
"""`finish(local results, func, args, kwargs)` returns the distributed results of a call."""


@dataclass(frozen=True, slots=True)
class _OperatorCall(CallPlan):
    """A call of one operator by its step; `places` are the indices of its tensors, None if a tensor is nested."""

    step: Step
    places: tuple[int, ...] | None
    requirements: ResultRequirements
    finish: Finish


class NestedOperands(_OperatorCall):
    """A call of the function with converted operands, some of which are in lists."""

    __slots__ = ()

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        with no_interception():
            tensors = _converted_tensors(self.step, None, args, kwargs)
            left = iter(tensors)
            local_args, local_kwargs = map_tensors(lambda _: next(left), (args, kwargs or _NOTHING))
            out = self.requirements.apply(func(*local_args, **local_kwargs), tensors)
        return self.finish(out, func, args, kwargs)


class ForeignOperator(_OperatorCall):
    """A call of a user's operator on plain tensors.

    The tensors that it saves must match the plain gradients of its backward pass.
    """

    __slots__ = ()

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        with no_interception():
            tensors = [plain_view(t) for t in _converted_tensors(self.step, self.places, args, kwargs)]
            out = self.requirements.apply(_local_result(self.step, tensors), tensors)
        return self.finish(out, func, args, kwargs)


@dataclass(frozen=True, slots=True)
class _ConvertedCall(CallPlan):
    """A call of the function with converted operands, each at a known place among the arguments."""

    moves: tuple[tuple[int, Move], ...]
    requirements: ResultRequirements
    finish: Finish


class PositionalOperands(_ConvertedCall):
    """A call of the function with converted operands, without keyword arguments."""

    __slots__ = ()

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        local = [*args]
        with no_interception():
            for at, move in self.moves:
                local[at] = shared_move(local[at], move)
            out = self.requirements.apply(func(*local), local)
        finish = self.finish  # a call of an attribute takes longer
        return finish(out, func, args, kwargs)


@dataclass(frozen=True, slots=True)
class OneConvertedOperand(CallPlan):
    """A call with one result, which needs no more checks; the operand at `at` is converted.

    All other tensors are distributed, so the result may be the converted operand itself, but no other plain tensor.
    """

    at: int
    move: Move
    spec: Spec

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        at, spec, local = self.at, self.spec, [*args]
        with no_interception():
            part = local[at] = shared_move(local[at], self.move)
            out: TorchValue = func(*local)
            if type(out) is not Tensor or out is part or out.dtype is not spec.dtype:
                return _stamp_all(with_argument_views(out, local), (spec,))
        out.__class__ = DistTensor
        out._spec = spec  # pyright: ignore[reportAttributeAccessIssue] - by its new class
        return out


class NamedOperands(_ConvertedCall):
    """A call of the function with converted operands, some of which may be keyword arguments."""

    __slots__ = ()

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        local = [*args, *kwargs.values()]
        with no_interception():
            for at, move in self.moves:
                local[at] = shared_move(local[at], move)
            named = dict(zip(kwargs, local[len(args) :], strict=True))
            out = self.requirements.apply(func(*local[: len(args)], **named), local)
        finish = self.finish
        return finish(out, func, args, kwargs)


def _finisher(step: Step) -> Finish:
    """Return a function that turns local results into distributed ones."""
    specs = step.outs

    def many(out: TorchValue, func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
        out = _stamp_all(out, specs)
        return out if step.broken is None else break_view(out, func, args, kwargs, step.broken, step.single)

    if not isinstance(step.node.out, Tensor) or step.broken is not None:
        return many
    spec = specs[0]

    def one(out: TorchValue, func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
        if type(out) is not Tensor or out.dtype is not spec.dtype:
            return _stamp_all(out, specs)
        out.__class__ = DistTensor
        out._spec = spec  # pyright: ignore[reportAttributeAccessIssue] - by its new class
        return out

    return one


@dataclass(frozen=True, slots=True)
class LocalForm(_OperatorCall):
    """A call of the operator with local sizes, or of its local form, on converted operands."""

    converted: Callable[[list[Tensor]], list[Tensor]]

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        step, converted, finish = self.step, self.converted, self.finish
        with no_interception():
            tensors = converted(_converted_tensors(step, self.places, args, kwargs))
            _check_savable(step, tensors)
            out = self.requirements.apply(_in_kind_of(step.node.out, _local_result(step, tensors)), tensors)
        return finish(out, func, args, kwargs)


def _check_savable(step: Step, tensors: Sequence[Tensor]) -> None:
    """Raise OperationError for an operand of inference mode that autograd may save, also on ranks that save nothing."""
    if torch.is_grad_enabled() and any(map(wants_grad, tensors)) and any(t.is_inference() for t in tensors):
        raise OperationError(
            f"{step.node.op.name().removeprefix('aten::')} of operands of which one requires grad",
            ", ".join(repr(spec) for spec in step.ins),
            "Inference tensors cannot be saved for backward",
            "pass operand.clone() in place of the operand that was made in inference mode",
        )


def _in_float32(step: Step) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return a function that converts operands to float32 if autocast requires that for the operator.

    The operator's local form consists of other operators, to which autocast does not apply this.
    """
    if step.form is None:
        return lambda tensors: tensors
    known: dict[torch.dtype, bool] = {}

    def converted(tensors: list[Tensor]) -> list[Tensor]:
        lower = autocast_dtype(tensors)
        if lower is None:
            return tensors
        if lower not in known:
            known[lower] = is_raised(step.node, tensors[0].device, lower)
        return [t.float() if t.dtype is lower else t for t in tensors] if known[lower] else tensors

    return converted


def _local_result(step: Step, tensors: Sequence[Tensor]) -> TorchValue:
    """Return the result of the operator, or of its local form, for this rank's parts."""
    here = current_communicator()
    args, kwargs = step.local_arguments(tensors, here)
    return step.form(step.call(here), *args, **kwargs) if step.form else step.node.op(*args, **kwargs)


_SIZED: dict[TorchFunction, TorchFunction] = {
    Tensor.view: Tensor.view,
    Tensor.reshape: Tensor.reshape,
    torch.reshape: Tensor.reshape,
    Tensor.expand: Tensor.expand,
    Tensor.unflatten: Tensor.view,
}
"""Functions that are equal to `f(tensor, local sizes)` on local tensors."""


@dataclass(frozen=True, slots=True)
class SizedCall(CallPlan):
    """A call of `local(tensor, local sizes)` for a function with global sizes, such as `view`."""

    spec: Spec
    local: TorchFunction
    requirements: ResultRequirements
    finish: Finish

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        sizes = self.spec.local_shape(current_communicator().rank)
        out = call_plain(self.local, types, (args[0], sizes), _NOTHING)
        apply = self.requirements.apply
        if apply is not with_argument_views:
            with no_interception():
                out = apply(out, args[:1])
        finish = self.finish
        return finish(out, func, args, kwargs)


@dataclass(frozen=True, slots=True)
class SmallerParts(CallPlan):
    """A call of the operator's smaller parts, each with its own plan."""

    nested: NestedCalls
    captured: Captured

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        real, node = _real_tensors(self.captured, args, kwargs), self.nested.node
        return _in_kind_of(node.out, self.nested.parts(*real(node.args), **real(node.kwargs)))


@dataclass(frozen=True, slots=True)
class RandomCall(CallPlan):
    """A call that computes whole results on every rank; each rank keeps its part, which has the spec in `outs`."""

    outs: tuple[Spec, ...]

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        left = iter(self.outs)
        note_drawing(next(t.device for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor)), None)
        return map_tensors(lambda t: _part_of_whole(t, next(left)), run_whole(func, args, kwargs or _NOTHING))


def _part_of_whole(x: Tensor, spec: Spec) -> Tensor:
    if not isinstance(x, DistTensor) or x._spec.layout == spec.layout:
        return x
    spec = spec.with_dtype(x._spec.dtype)
    return as_part(convert_local(x, x._spec, spec), spec)


def _in_kind_of(meta: TorchValue, out: TorchValue) -> TorchValue:
    """Return results in the kind of tuple that the operator returns."""
    return out if isinstance(out, Tensor) or not hasattr(type(meta), "n_fields") else type(meta)(tuple(out))


def _real_tensors(captured: Captured, args: TorchValue, kwargs: TorchValue) -> Callable[[TorchValue], TorchValue]:
    """Return a function that replaces the meta tensors of a capture by the call's tensors."""
    known = real_inputs(captured, args, kwargs)
    return lambda tree: map_tensors(lambda t: known[id(t)], tree)


def real_inputs(captured: Captured, args: TorchValue, kwargs: TorchValue) -> dict[int, Tensor]:
    """Return the id of each captured argument → the tensor of the call that it stands for."""
    return {id(meta): t for meta, t in zip(captured.inputs, tensors_in((args, kwargs)), strict=True)}


class FirstArgument(CallPlan):
    """A call that returns its first argument."""

    __slots__ = ()

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        return args[0]


@dataclass(frozen=True, slots=True)
class ReturnedArguments(CallPlan):
    """A call that returns some of its arguments."""

    captured: Captured

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        return _real_tensors(self.captured, args, kwargs)(self.captured.out)


def plan_identity(captured: Captured, args: TorchValue) -> CallPlan:
    """Return the plan of a call that returns its own arguments."""
    if isinstance(captured.out, Tensor) and captured.inputs[0] is captured.out and args and isinstance(args[0], Tensor):
        return FirstArgument()
    return ReturnedArguments(captured)


@dataclass(frozen=True, slots=True)
class ConstantResult(CallPlan):
    """A call whose result follows from shapes and dtypes."""

    out: TorchValue

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        return self.out


class PlainMemory(CallPlan):
    """A call that returns memory of a plain argument, and reads only shape and dtype of distributed ones."""

    __slots__ = ()

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        with no_interception():
            args, kwargs = map_tensors(_uninitialised, (args, kwargs or _NOTHING))
            return func(*args, **kwargs)


def _uninitialised(t: Tensor) -> Tensor:
    """Return an uninitialised plain tensor with the global shape and strides of a distributed one; others unchanged."""
    if not isinstance(t, DistTensor):
        return t
    return torch.empty_strided(t._spec.shape, t._spec.full_strides, dtype=t.dtype, device=t.device)


@dataclass(frozen=True, slots=True)
class OperatorSequence(CallPlan):
    """A call whose operators run one by one on distributed tensors."""

    captured: Captured

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        known = real_inputs(self.captured, args, kwargs)
        known |= {id(c): c.clone() for c in self.captured.constants}
        # the call's own plain tensors have been checked; the others are made of numbers, such as 0 in `grad[1:] = 0`
        with plain_are_whole() if plain_may_be_part() else nullcontext():
            for node in self.captured.nodes:
                _run_node(node, known)
        return map_tensors(lambda t: known[id(t)], self.captured.out)


def _run_node(node: CapturedNode, known: dict[int, Tensor]) -> None:
    def present(x: object) -> object:
        if isinstance(x, torch.device) and x.type == "meta":
            return next(iter(known.values())).device
        return known[id(x)] if isinstance(x, Tensor) else x

    args, kwargs = map_leaves(present, (node.args, node.kwargs))
    out: TorchValue = node.op(*args, **kwargs)
    for meta, real in zip(tensors_in(node.out), tensors_in(out), strict=True):
        known[id(meta)] = real


@dataclass(frozen=True, slots=True)
class ContiguousResults(CallPlan):
    """A call of a decomposed operator; `contiguous` is True for each result that the operator gives contiguous."""

    plan: CallPlan
    contiguous: Sequence[bool]

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        left = iter(self.contiguous)
        out = self.plan.run(func, types, args, kwargs)
        return map_tensors(lambda x: x.contiguous() if next(left) else x, out)


def in_order_of(given: Captured, plan: CallPlan) -> CallPlan:
    """Return the plan of a decomposed operator, with contiguous results where the operator gives contiguous ones."""
    contiguous = [strides_of(x) is None for x in tensors_in(given.out)]
    if not any(contiguous) or all(strides_of(x) is None for x in given.inputs):
        return plan
    return ContiguousResults(plan, contiguous)


@dataclass(frozen=True, slots=True)
class ReplayedViews(CallPlan):
    """A call with views that autograd repeats as they were made.

    Gradients have the memory order of the kernels.
    """

    plan: CallPlan

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        with view_replay():
            out = self.plan.run(func, types, args, kwargs)
        if torch.is_grad_enabled():
            given = {id(t) for t in tensors_in((args, kwargs))}
            _reorder_gradients([x for x in tensors_in(out) if id(x) not in given])
        return out


def _reorder_gradients(made: Sequence[Tensor]) -> None:
    with no_interception():
        for x in made:
            if not x.numel() and x.requires_grad:
                x.register_hook(_reordered)


def _reordered(grad: Tensor | None) -> Tensor | None:
    """Return an empty gradient with contiguous strides; `contiguous()` would not change an expanded empty tensor.

    The engine passes None for a gradient of zeros, such as that of a view whose values were all overwritten.
    """
    return None if grad is None else grad.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class FunctionalTwin(CallPlan):
    """A call of an in-place operator as its functional twin (`add` for `add_`) and a copy.

    `unseen` is True if autograd does not see the write of the operator.
    """

    node: CapturedNode
    captured: Captured
    twin: TorchFunction
    unseen: bool

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        real, node = _real_tensors(self.captured, args, kwargs), self.node
        target = real(node.args[0])
        if isinstance(target, DistTensor) and node.op not in SETTING:
            check_own_elements(target)
        before = target.clone() if torch.is_grad_enabled() else target
        new = self.twin(before, *real(node.args[1:]), **real(node.kwargs))
        with torch.no_grad() if self.unseen else nullcontext():
            return write_into(target, new)


def plan_twin(node: CapturedNode, captured: Captured) -> CallPlan | None:
    """Return the plan of an in-place operator that has a functional twin; None for other operators."""
    twin = _twin(node)
    if twin is None or not isinstance(node.args[0], Tensor):
        return None
    return FunctionalTwin(node, captured, twin, _is_unseen(node))


def _is_unseen(node: CapturedNode) -> bool:
    """True if autograd does not see the write of the operator: the gradient passes as if nothing had been written."""
    target: Tensor = node.args[0]
    if not target.is_floating_point() and not target.is_complex():
        return False
    with no_modes(), torch.enable_grad():
        written = torch.empty_like(target, requires_grad=True) * 1
        before = written.grad_fn
        try:
            node.op(written, *node.args[1:], **node.kwargs)
        except RuntimeError:  # torch refuses the derivative; the call itself raises that error
            return False
        return written.grad_fn is before


def _twin(node: CapturedNode) -> Callable[..., TorchValue] | None:
    name = node.op._schema.name.split("::")[1]
    if not name.endswith("_") or name.endswith("__") or node.out is not node.args[0]:
        return None
    if torch.Tag.inplace_view in node.op.tags:
        return None  # `set_` gives its argument other memory, and writing values into the old memory is not the same
    packet: OperatorPacket | None = getattr(torch.ops.aten, name[:-1], None)
    twin: Operator | None = None if packet is None else getattr(packet, node.op._overloadname, None)
    if twin is None or parameters_of(twin) != parameters_of(node.op):
        return None
    if len(written_arguments(node.op)) != 1 or written_arguments(twin):
        return None
    if "dtype" in dict(parameters_of(twin)) and node.kwargs.get("dtype") is None:
        return partial(twin, dtype=node.args[0].dtype)  # the result of `cumsum` is wider, and takes booleans
    return twin
