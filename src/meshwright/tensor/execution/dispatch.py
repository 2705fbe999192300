"""Dispatch of calls on distributed tensors without a known plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType

import torch
from torch import Tensor

from meshwright.layout import Cache, MeshwrightError, ProcessMesh, Spec, TorchValue
from meshwright.spmd import depends_on_arguments, registration_callbacks

from .._errors import MixedMeshError, OperationError, PlainInBackwardError
from .._torch_call import TorchFunction
from ..autograd import backward_handlers, forward_mode, user_functions
from ..autograd.intercepted_call import argument_at
from ..autograd.user_functions import plain_may_be_part
from ..capture.call_capture import Captured, asks_sizes, autocast_dtype
from ..capture.metadata_check import check_meta_result
from ..capture.trial_calls import check_kernel, why_not_captured
from ..conversion import python_values
from ..conversion.stage_order import on_latest_stage
from ..conversion.whole_call import warn_ran_whole
from ..core.absent_tensor import Absent
from ..core.dist_tensor import PLANS, DistTensor, Run, floats_in
from ..core.function_names import name_of
from ..core.handler_registry import DIRECT, HANDLERS
from ..core.rank_ownership import check_maker
from ..core.tree import leaves_in, tensors_in
from ..handlers import list_arguments, memory_access, random_functions, tensor_attributes
from ..handlers.out_targets import into_targets, targets_in
from ..handlers.torch_distributed import handler_of
from ..planning.attention_algorithm import Context, attention_algorithm
from ..planning.call_plan import (
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
from ..torch_hooks import (
    Operator,
    OperatorPacket,
    call_plain,
    is_batched,
    is_dense,
    positional,
    seen_below_autograd,
    shares_storage,
)
from ..views.dist_view import DistView, after_call, before_call, check_writable, is_unversioned, run_whole
from ..views.write_overlap import check_overlap, is_elementwise, is_write
from .captured_call import CapturedCall, capture_call, plan_captured, result_specs
from .foreach_functions import is_of_lists, plan_lists
from .outside_mesh import SharedResult, plan_outside
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
from .torch_hooks import SCRIPTED

HANDLING = (
    user_functions,
    tensor_attributes,
    forward_mode,
    backward_handlers,
    list_arguments,
    memory_access,
    random_functions,
    python_values,
)
"""Modules whose import fills HANDLERS, or registers users' functions."""

_VALUED = Cache[Hashable, bool](8192)
"""Signatures of calls whose plans depend on the values of floats."""

_FIXED = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType, Operator, OperatorPacket)
"""Kinds of functions that call one operator for all values of floats; a Python function may branch on them."""


_SETTING = frozenset(
    {
        torch.ops.aten.zero_.default,
        torch.ops.aten.fill_.Scalar,
        torch.ops.aten.fill_.Tensor,
        torch.ops.aten.copy_.default,
    }
)
"""Operators that write without reading the old value."""


def planned(
    func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue, key: Hashable
) -> TorchValue:
    """Carry out the call by its plan, which is made if the signature `key` is new."""
    plan = PLANS.get(key)
    return plan(func, types, args, kwargs) if plan is not None else dispatch(func, types, args, kwargs, key)


def dispatch(
    func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue, key: Hashable
) -> TorchValue:
    """Carry out `func(*args, **kwargs)` with distributed tensors among its arguments; `key` is its signature."""
    direct = DIRECT.get(func)
    if direct is not None:
        if key is not None:
            PLANS[key] = direct
        return direct(func, types, args, kwargs)
    kwargs = kwargs or {}
    if _is_below(func):
        return call_plain(func, types, args, kwargs)
    tensors = list(tensors_in((args, kwargs)))
    _check_unbatched(func, tensors)
    targets = targets_in(func, kwargs)
    if len(tensors) > 1 and not targets and not is_of_lists(func):
        together = on_latest_stage(name_of(func), args, kwargs)
        if together is not None:
            return func(*together[0], **together[1])
    if len(tensors) > 1 and is_write(func, targets):
        args, kwargs = check_overlap(func, args, kwargs, targets)
        tensors = list(tensors_in((args, kwargs)))
    views = [t for t in tensors if type(t) is DistView]
    if not views:
        return _handled_or_planned(func, types, args, kwargs, tensors, targets, key)
    before = before_call(views)
    out = _handled_or_planned(func, types, args, kwargs, tensors, targets, key)
    after_call(views, before, out, _written_unseen(func, args, kwargs, tensors))
    return out


def _handled_or_planned(
    func: TorchFunction,
    types: Sequence[type],
    args: TorchValue,
    kwargs: TorchValue,
    tensors: Sequence[Tensor],
    targets: Sequence[str],
    key: Hashable,
) -> TorchValue:
    """Carry out a call whose views have been read again: into its targets, by its handler, or else by a new plan."""
    if targets:
        out = into_targets(func, args, kwargs, targets)
        if out is not NotImplemented:
            return out
    handler = HANDLERS.get(func) or handler_of(func)
    if handler is not None:
        out = handler(func, types, *positional(func, args, kwargs))
        if out is not NotImplemented:
            return out
    return _carry_out(func, types, args, kwargs, tensors, key, handled=handler is not None)


def _written_unseen(
    func: TorchFunction, args: TorchValue, kwargs: TorchValue, tensors: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the views of inference mode that the call writes to: by its operators, or by its name if torch refuses."""
    unseen = [t for t in tensors if type(t) is DistView and is_unversioned(t)]
    if not unseen or is_of_lists(func):  # the calls for the entries of a list write back by themselves
        return []
    try:
        captured = capture_call(func, args, kwargs).captured
    except Exception:  # a result whose size depends on values
        name = name_of(func)
        return unseen if name.endswith("_") or name == "__setitem__" else []
    written = {id(m) for m in written_inputs(captured)}
    return [t for m, t in zip(captured.inputs, tensors, strict=True) if id(m) in written]


def _is_below(func: TorchFunction) -> bool:
    """True for an operator that a dispatch mode of the user calls inside a backward pass, on local parts."""
    return isinstance(func, Operator) and seen_below_autograd()


@dataclass(frozen=True, slots=True)
class _OperatorOrBelow(CallPlan):
    """A call of an operator that a dispatch mode may call on local parts as well."""

    plan: CallPlan

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        if _is_below(func):
            return call_plain(func, types, args, kwargs or {})
        return self.plan.run(func, types, args, kwargs)


@dataclass(frozen=True, slots=True)
class _WriteBesideOperands(CallPlan):
    """A call that writes to its first argument, and has other operands, which may be in the same memory."""

    plan: CallPlan
    elementwise: bool

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        written = args[0] if args else argument_at(args, kwargs, 0, "self", "input")
        if not isinstance(written, Tensor):  # a list
            return self._run_checked(func, types, args, kwargs)
        for x in args[1:] if not kwargs else (*args[1:], *kwargs.values()):
            if type(x) is DistTensor and shares_storage(x, written) and not (x is written and self.elementwise):
                return self._run_checked(func, types, args, kwargs)
        return self.plan.run(func, types, args, kwargs)

    def _run_checked(
        self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue
    ) -> TorchValue:
        now, named = check_overlap(func, args, kwargs or {}, ())
        is_copied = any(
            a is not b for a, b in zip(tensors_in((args, kwargs or {})), tensors_in((now, named)), strict=True)
        )
        return func(*now, **named) if is_copied else self.plan.run(func, types, args, kwargs)


def _check_unbatched(func: TorchFunction, tensors: Sequence[Tensor]) -> None:
    """Raise OperationError for a plain tensor that is a batch, inside the vmap of torch.autograd."""
    for t in tensors:
        if not isinstance(t, DistTensor) and is_batched(t):
            specs = ", ".join(repr(x._spec) for x in tensors if isinstance(x, DistTensor))
            raise OperationError(
                f"{name_of(func)} inside the vmap of torch.autograd",
                specs,
                "a batch of tensors cannot be sent between ranks",
                "use torch.func.vmap, jacfwd or jacrev, or strategy='reverse-mode'; call gradcheck without "
                "check_batched_grad",
            )


def _carry_out(
    func: TorchFunction,
    types: Sequence[type],
    args: TorchValue,
    kwargs: TorchValue,
    tensors: Sequence[Tensor],
    key: Hashable,
    handled: bool,
) -> TorchValue:
    """Plan the call, store the plan and run it; a handler that declined (`handled`) may have read floats."""
    planning = _plan_lists if is_of_lists(func) else _plan_operators
    plan, by_value = planning(func, args, kwargs, tensors)
    out = plan.run(func, types, args, kwargs)
    if key is not None and not recording():
        kept = _OperatorOrBelow(plan.settled) if isinstance(func, Operator) else plan.settled
        if len(tensors) > 1 and is_write(func, ()):
            kept = _WriteBesideOperands(kept, is_elementwise(func))
        _remember(key, args, kwargs, kept, by_value or handled)
    return out


def _plan_operators(
    func: TorchFunction, args: TorchValue, kwargs: TorchValue, tensors: Sequence[Tensor]
) -> tuple[CallPlan, bool]:
    """Return what `make_plan` returns, also for calls that are carried out otherwise; raise an error for invalid calls.

    Raises MixedMeshError, PlainInBackwardError, and OperationError for a tensor of another simulated rank.
    """
    mesh = _common_mesh(func, tensors)
    for t in tensors:
        if isinstance(t, DistTensor):
            check_maker(t, name_of(func))
    _guard_backward(func, tensors)
    if isinstance(func, SCRIPTED):
        return _WholeTensors("TorchScript runs in C++"), False
    if not all(isinstance(t, DistTensor) or is_dense(t) for t in tensors):
        return _WholeTensors("an operand is sparse or nested"), False
    if any(isinstance(t, Absent) for t in tensors):
        return plan_outside(func, args, kwargs), True
    return make_plan(func, args, kwargs, mesh)


def _remember(key: Hashable, args: TorchValue, kwargs: TorchValue, plan: CallPlan, by_value: bool) -> None:
    floats = floats_in(args, kwargs)
    if floats and (by_value or key in _VALUED):
        _VALUED[key] = True
        PLANS[key] = _plan_by_floats(key, args, kwargs).run
        PLANS[key, floats] = plan.run
    else:
        PLANS[key] = plan.run


@dataclass(frozen=True, slots=True)
class _PlanByFloats(CallPlan):
    """A call with the signature `key`, whose plan is looked up by the values of its floats too."""

    key: Hashable

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        run = PLANS.get((self.key, floats_in(args, kwargs)))
        return dispatch(func, types, args, kwargs, self.key) if run is None else run(func, types, args, kwargs)


@dataclass(frozen=True, slots=True)
class _PlanByOneFloat(_PlanByFloats):
    """The same for a call whose only float is at `place`: most calls take one lookup."""

    place: int | str
    is_named: bool
    plans: Cache[float, Run]

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        plans, value = self.plans, (kwargs if self.is_named else args)[self.place]
        plan = plans.get(value) if value else None  # 0.0 equals -0.0
        if plan is not None:
            return plan(func, types, args, kwargs)
        found = PLANS.get((self.key, floats_in(args, kwargs)))
        if found is not None and value:
            plans[value] = found
        return _PlanByFloats.run(self, func, types, args, kwargs)


def _plan_by_floats(key: Hashable, args: TorchValue, kwargs: TorchValue) -> CallPlan:
    """Return the plan of calls with the signature `key`; the arguments are those of the first call."""
    places = [k for k, value in (*enumerate(args), *(kwargs or {}).items()) if type(value) is float]
    if len(places) != 1 or len(floats_in(args, kwargs)) != 1:
        return _PlanByFloats(key)
    return _PlanByOneFloat(key, places[0], isinstance(places[0], str), Cache(64))


def _common_mesh(func: TorchFunction, tensors: Sequence[Tensor]) -> ProcessMesh:
    specs = [t._spec for t in tensors if isinstance(t, DistTensor)]
    mesh = specs[0].mesh
    for spec in specs:
        if spec.mesh is not mesh:
            raise MixedMeshError(
                f"{name_of(func)} of tensors on two meshes",
                f"{specs[0]!r} on {mesh!r} and {spec!r} on {spec.mesh!r}",
                "an operation runs on one mesh",
                "call mw.reshard(x, mesh, placements) to move one of them",
            )
    return mesh


def _guard_backward(func: TorchFunction, tensors: Sequence[Tensor]) -> None:
    """Raise PlainInBackwardError inside a backward pass for a plain tensor that may be part of a gradient."""
    if not plain_may_be_part():
        return
    for t in tensors:
        if isinstance(t, DistTensor):
            continue
        if not torch.is_grad_enabled() or (t.requires_grad and not t.is_leaf):
            raise PlainInBackwardError(
                f"{name_of(func)} inside a backward pass",
                "a plain tensor beside a distributed one",
                "the plain tensor may be this rank's part of a gradient or a whole value, and Meshwright cannot know",
                "in a tensor hook, use mw.shard_tensor(table, mesh, [mw.Replicate()]) for a table of numbers and "
                "torch.zeros_like of a distributed tensor for zeros, or use the plain tensor after the pass. In an "
                "autograd.Function, save arguments by ctx.save_for_backward, or wrap the function with mw.local_map",
            )


def make_plan(func: TorchFunction, args: TorchValue, kwargs: TorchValue, mesh: ProcessMesh) -> tuple[CallPlan, bool]:
    """Return the plan of the call, and True if its float arguments count by value.

    Floats count by type only if two conditions hold. A C function is called with the caller's own arguments, so the
    plan keeps none of them. And neither its rule nor its effect on pending sums depends on their values.
    """
    try:
        call = capture_call(func, args, kwargs)
    except Exception as error:  # torch raises many kinds: data-dependent, no meta kernel, or the user's own mistake
        plan = SharedResult(mesh, _WholeTensors(why_not_captured(func, args, kwargs, error), failed=True))
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
        return _WholeTensors("several elements of a tensor that it writes to share memory", failed=True), False
    if not captured.nodes and any(callable(x) for x in leaves_in((call.args, call.kwargs))):
        return _WholeTensors("it calls a Python function with numbers, which a capture does not see"), False
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


def _plan_lists(
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
    reads = any(node.op not in _SETTING for node in captured.nodes)
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
            return (twin, False) if twin is not None else (_WholeTensors("it has no rule"), True)
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
class _WholeTensors(CallPlan):
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


DistTensor._dispatch = staticmethod(dispatch)
registration_callbacks.append(PLANS.clear)
