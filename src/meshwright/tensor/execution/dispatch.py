"""Dispatch of calls on distributed tensors without a known plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.layout import Cache, ProcessMesh, TorchValue
from meshwright.spmd import registration_callbacks

from .._errors import MixedMeshError, OperationError, PlainInBackwardError
from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..autograd import backward_handlers, forward_mode, user_functions
from ..autograd.intercepted_call import argument_at
from ..autograd.user_functions import plain_may_be_part
from ..conversion import python_values
from ..conversion.stage_order import on_latest_stage, whole_for_plain_target
from ..core.absent_tensor import Absent
from ..core.dist_tensor import PLANS, DistTensor, Run, floats_in
from ..core.function_names import name_of
from ..core.handler_registry import DIRECT, HANDLERS
from ..core.other_libraries import check_library
from ..core.rank_ownership import check_maker
from ..core.tree import leaves_in, tensors_in
from ..handlers import list_arguments, memory_access, random_functions, tensor_attributes
from ..handlers.out_targets import into_targets, targets_in
from ..handlers.torch_distributed import handler_of
from ..planning.call_plan import (
    written_inputs,
)
from ..planning.decision_record import recording
from ..torch_hooks import (
    Operator,
    call_plain,
    is_batched,
    is_dense,
    positional,
    seen_below_autograd,
    shares_storage,
)
from ..views.dist_view import DistView, after_call, before_call, is_unversioned
from ..views.write_overlap import check_overlap, is_elementwise, is_write
from .call_planning import WholeTensors, make_plan, plan_of_lists
from .captured_call import capture_call
from .foreach_functions import is_of_lists
from .outside_mesh import plan_outside
from .run_plan import (
    CallPlan,
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
    check_library(name_of(func), str(getattr(func, "__module__", "")), tensors)
    _check_unbatched(func, tensors)
    targets = targets_in(func, kwargs)
    together = _of_several_stages(func, args, kwargs, targets) if len(tensors) > 1 else None
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


def _of_several_stages(
    func: TorchFunction, args: Arguments, kwargs: NamedArguments, targets: Sequence[str]
) -> tuple[Arguments, NamedArguments] | None:
    """Return the arguments of a call that needs values of other pipeline stages, with these values; else None."""
    whole = whole_for_plain_target(name_of(func), args, kwargs, targets)
    if whole is not None or targets or is_of_lists(func):
        return whole
    return on_latest_stage(name_of(func), args, kwargs)


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
    planning = plan_of_lists if is_of_lists(func) else _plan_operators
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
        return WholeTensors("TorchScript runs in C++"), False
    if not all(isinstance(t, DistTensor) or is_dense(t) for t in tensors):
        return WholeTensors("an operand is sparse or nested"), False
    if any(isinstance(t, Absent) for t in tensors):
        return plan_outside(func, args, kwargs), True
    return make_plan(func, args, kwargs, mesh)


def _remember(key: Hashable, args: TorchValue, kwargs: TorchValue, plan: CallPlan, by_value: bool) -> None:
    """Store the plan of calls with the signature `key`; a plan that depends on a symbolic float is for one call."""
    if by_value and any(isinstance(x, torch.SymFloat) for x in leaves_in((args, kwargs))):
        return
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


DistTensor._dispatch = staticmethod(dispatch)
registration_callbacks.append(PLANS.clear)
