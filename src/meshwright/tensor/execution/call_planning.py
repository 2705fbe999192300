"""Planning of a call: capture it, find the rules of its operators, and choose how it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType

import torch
from torch import Tensor

from meshwright.layout import MeshwrightError, ProcessMesh, Spec, TorchValue
from meshwright.spmd import depends_on_arguments

from .._errors import OperationError
from .._torch_call import TorchFunction
from ..capture.call_capture import Captured, asks_sizes, autocast_dtype
from ..capture.metadata_check import check_meta_result
from ..capture.trial_calls import check_kernel, why_not_captured
from ..conversion.whole_call import warn_ran_whole
from ..core.dist_tensor import DistTensor
from ..core.function_names import name_of
from ..core.tree import leaves_in, tensors_in
from ..planning.attention_algorithm import Context, attention_algorithm
from ..planning.call_plan import (
    SETTING,
    NestedCalls,
    OneByOne,
    OperatorPlan,
    RandomWhole,
    Step,
    Unchanged,
    is_constant,
    is_view_of_plain,
    leaves_nothing,
    makes_views,
    may_alias,
    numbers_decide,
    returns_arguments,
    writes_overlapping,
    written_inputs,
)
from ..planning.decision_record import CallRecord, note, recording
from ..planning.result_checks import ResultRequirements
from ..torch_hooks import Operator, OperatorPacket, shares_storage
from ..views.dist_view import run_whole
from ..views.view_checks import check_writable
from .captured_call import CapturedCall, capture_call, plan_captured, result_specs
from .foreach_functions import plan_lists
from .outside_mesh import SharedResult
from .reduced_operands import ReducedOperands, pending_places, reduced_arguments
from .run_plan import (
    CallPlan,
    ConstantResult,
    OperatorSequence,
    PlainMemory,
    RandomCall,
    ReplayedViews,
    SmallerParts,
    in_order_of,
    plan_direct,
    plan_identity,
    plan_step,
    plan_twin,
)

_FIXED = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType, Operator, OperatorPacket)
"""Kinds of functions that call one operator for all values of floats; a Python function may branch on them."""


def make_plan(func: TorchFunction, args: TorchValue, kwargs: TorchValue, mesh: ProcessMesh) -> tuple[CallPlan, bool]:
    """Return the plan of the call, and True if its float arguments count by value.

    Floats count by type only if two conditions hold. A C function is called with the caller's own arguments, so the
    plan keeps none of them. And neither its rule nor its effect on pending sums depends on their values.
    """
    try:
        call = capture_call(func, args, kwargs)
    except Exception as error:  # torch raises many kinds: data-dependent, no meta kernel, or the user's own mistake
        plan = SharedResult(mesh, WholeTensors(why_not_captured(func, args, kwargs, error), failed=True))
        return _by_setting(plan, mesh, _autocast_dtype, args, kwargs), True
    return _plan_apart(call, mesh) or _plan_by_rules(call, mesh)


def _plan_apart(call: CapturedCall, mesh: ProcessMesh) -> tuple[CallPlan, bool] | None:
    """Return what `make_plan` returns for a call that needs no rule or has none; None for any other call."""
    captured = call.captured
    if is_constant(captured):
        check_meta_result(call.func, call.args, call.kwargs, captured.out)
        return _by_setting(ConstantResult(captured.out), mesh, _default_dtype, call.args, call.kwargs), True
    if is_view_of_plain(captured, [isinstance(t, DistTensor) for t in call.tensors]):
        return PlainMemory(), True
    _check_written(captured, call.tensors)
    if writes_overlapping(captured):
        return WholeTensors("several elements of a tensor that it writes to share memory", failed=True), False
    if not captured.nodes and any(callable(x) for x in leaves_in((call.args, call.kwargs))):
        return WholeTensors("it calls a Python function with numbers, which a capture does not see"), False
    return None


def _plan_by_rules(call: CapturedCall, mesh: ProcessMesh) -> tuple[CallPlan, bool]:
    """Return what `make_plan` returns for a call whose operators have rules."""
    if returns_arguments(call.captured, call.args, call.kwargs):
        call = replace(call, captured=replace(call.captured, nodes=()))
    specs = call.specs
    captured, found = _checked_plan(call, mesh)
    places = pending_places(found, captured, call.args)
    if not places or reduced_arguments(places, call.args) is None:  # else another call is decided
        _record_decision(call.func, found, tuple(specs.values()))
    plan, passes_arguments = _call_plan(call, captured, found)
    plan = _as_whole(call.captured, captured, plan, specs)
    if places:
        plan = ReducedOperands(plan, places)
    if not passes_arguments and not (isinstance(found, Step) and _keeps_dtypes(found)):
        plan = _by_setting(plan, mesh, _default_dtype, call.args, call.kwargs)
    if isinstance(found, Step) and found.context is not None:
        plan = _by_setting(plan, mesh, _context, call.args, call.kwargs)
    is_unchanged = captured is call.captured
    by_type = passes_arguments and is_unchanged and _ignores_floats(call.func, captured, specs, mesh)
    return plan, not by_type


def _checked_plan(call: CapturedCall, mesh: ProcessMesh) -> tuple[Captured, OperatorPlan | None]:
    """Return what `plan_captured` returns, for a function that may read sizes or lack a kernel.

    Raises torch's NotImplementedError if a local form replaces an operator without a kernel for its dtypes.
    """
    specs = call.specs
    captured, plan = plan_captured(call.captured, specs, mesh)
    if isinstance(plan, Step) and plan.form is not None:
        check_kernel(plan.node, next(t.device for t in call.tensors if isinstance(t, DistTensor)))
    if not _is_direct(plan) or not asks_sizes(call.func, call.args, call.kwargs, captured, tuple(specs.values())):
        return captured, plan
    return captured, replace(plan, direct=False) if isinstance(plan, Step) else OneByOne(captured)


def _as_whole(given: Captured, captured: Captured, plan: CallPlan, specs: Mapping[int, Spec]) -> CallPlan:
    """Return the plan with the memory order of `given`, which was taken apart, and views that autograd can repeat."""
    if captured is not given:
        plan = in_order_of(given, plan)
    is_empty_somewhere = any(leaves_nothing(s) for s in specs.values())
    return ReplayedViews(plan) if is_empty_somewhere and makes_views(captured) else plan


def plan_of_lists(
    func: TorchFunction, args: TorchValue, kwargs: TorchValue, tensors: Sequence[Tensor]
) -> tuple[CallPlan, bool]:
    """Return the plan of a function of lists, and True if its float arguments count by value."""
    plan, captured = plan_lists(func, args, kwargs, tensors)
    if captured is None:
        return plan, False
    pending = any(isinstance(t, DistTensor) and t._spec.layout.partial for t in tensors)
    return plan, pending or any(depends_on_arguments(n.op) for n in captured.nodes)


def _check_written(captured: Captured, tensors: Sequence[Tensor]) -> None:
    """Raise OperationError if the call writes to a view that cannot be written to."""
    written = {id(m) for m in written_inputs(captured)}
    reads = any(node.op not in SETTING for node in captured.nodes)
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    for m, t in zip(captured.inputs, tensors, strict=True):
        if id(m) in written:
            check_writable(t, reads, graded)


def _ignores_floats(func: TorchFunction, captured: Captured, specs: Mapping[int, Spec], mesh: ProcessMesh) -> bool:
    """True if the values of floats decide neither which operators `func` calls nor the layouts of their results."""
    if not isinstance(func, _FIXED) or len(captured.nodes) != 1 or depends_on_arguments(captured.nodes[0].op):
        return False
    return not numbers_decide(captured.nodes[0], specs, mesh)


Setting = Callable[[TorchValue, TorchValue], Hashable]
"""Function from the call's arguments to a global setting that a plan depends on."""


def _keeps_dtypes(step: Step) -> bool:
    """True if the default dtype has no influence: every result has the dtype of an operand."""
    node = step.node
    given = {x.dtype for x in tensors_in((node.args, node.kwargs))}
    return given.issuperset(x.dtype for x in tensors_in(node.out))


def _context(args: TorchValue, kwargs: TorchValue) -> Context:
    return attention_algorithm()


def _default_dtype(args: TorchValue, kwargs: TorchValue) -> torch.dtype:
    return torch.get_default_dtype()


def _autocast_dtype(args: TorchValue, kwargs: TorchValue) -> torch.dtype | None:
    return autocast_dtype(tensors_in((args, kwargs)))


@dataclass(frozen=True, slots=True)
class _PlanBySetting(CallPlan):
    """A call with a plan for each value of a global setting."""

    setting: Setting
    mesh: ProcessMesh
    plans: dict[Hashable, CallPlan]

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        now, plans = self.setting(args, kwargs), self.plans
        if now not in plans:
            plans[now], _ = make_plan(func, args, kwargs or {}, self.mesh)
        out = plans[now].run(func, types, args, kwargs)
        plans[now] = plans[now].settled
        return out


def _by_setting(plan: CallPlan, mesh: ProcessMesh, setting: Setting, args: TorchValue, kwargs: TorchValue) -> CallPlan:
    """Return a plan for all values of a setting; `plan` is the plan for the setting at this time."""
    return _PlanBySetting(setting, mesh, {setting(args, kwargs): plan})


def _is_direct(plan: OperatorPlan | None) -> bool:
    """True if the plan calls the caller's own function on parts."""
    return plan.direct if isinstance(plan, Step) else isinstance(plan, Unchanged) and bool(plan.outs)


def _call_plan(call: CapturedCall, captured: Captured, found: OperatorPlan | None) -> tuple[CallPlan, bool]:
    """Return the plan of the call, and True if it calls the caller's function with the caller's arguments."""
    func, args, kwargs = call.func, call.args, call.kwargs
    match found:
        case None:
            twin = plan_twin(captured.nodes[0], captured) if len(captured.nodes) == 1 else None
            return (twin, False) if twin is not None else (WholeTensors("it has no rule"), True)
        case Step():
            return plan_step(found, func, args, kwargs), found.direct and not found.grown
        case RandomWhole():
            return RandomCall(found.outs), True
        case NestedCalls():
            return SmallerParts(found, captured), False
        case _ if not captured.nodes:
            return plan_identity(captured, args), False
        case OneByOne():
            return OperatorSequence(captured), False
        case Unchanged():
            requirements = ResultRequirements(name_of(func), found.outs, _fresh(captured))
            return plan_direct(found.outs, captured.out, args, kwargs, requirements), True


def _fresh(captured: Captured) -> tuple[bool | None, ...]:
    """Return one flag for each result that may alias an argument of the call: True if new, False if an alias."""
    results = list(tensors_in(captured.out))
    if not any(may_alias(node.op) for node in captured.nodes):
        return (None,) * len(results)
    return tuple(not any(r is t or shares_storage(r, t) for t in captured.inputs) for r in results)


@dataclass(frozen=True, slots=True)
class WholeTensors(CallPlan):
    """A call that runs on whole tensors on every rank; it warns once per name.

    `failed` is True if torch could not carry out the call without values, and may refuse it with values too.
    """

    why: str
    failed: bool = False

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        try:
            out = run_whole(func, args, kwargs or {})
        except RuntimeError as error:
            if not self.failed or isinstance(error, MeshwrightError):
                raise
            raise _refused(func, args, kwargs, error) from error
        warn_ran_whole(name_of(func), self.why)
        return out


def _refused(func: TorchFunction, args: TorchValue, kwargs: TorchValue, error: RuntimeError) -> OperationError:
    specs = ", ".join(
        repr(t._spec) if isinstance(t, DistTensor) else f"plain {tuple(t.shape)}"
        for t in tensors_in((args, kwargs or {}))
    )
    return OperationError(
        name_of(func),
        specs,
        str(error).split("\n")[0],
        "pass operands that are valid on one device; the shapes above are those of the whole tensors",
    )


def _record_decision(func: TorchFunction, plan: OperatorPlan | None, ins: tuple[Spec, ...]) -> None:
    """Add the call to the record of decisions, if there is one."""
    if recording():
        moves = plan.moves if isinstance(plan, Step) else ()
        note(CallRecord(name_of(func), ins, moves, result_specs(plan), _execution_of(plan)))


def _execution_of(plan: OperatorPlan | None) -> str:
    """Return the description of the execution of a call, as `CallRecord.how` has it."""
    match plan:
        case None | RandomWhole():
            return "whole"
        case NestedCalls():
            return "parts"
        case Step(context="ring" | "ulysses" as algorithm):
            return algorithm
        case OneByOne():
            return "operators"
        case Step() | Unchanged():
            return "local"
