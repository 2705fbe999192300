"""Every call on a distributed tensor whose plan is not known yet comes here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import MeshwrightError, ProcessMesh, Spec
from meshwright.spmd import is_computed, on_new_rule

from . import _functions, _handle_data, _handle_gradients, _handle_lists, _handle_random, _handle_values
from ._absent import Absent
from ._alias import DistView, after_call, before_call, run_whole
from ._capture import Captured, asks_sizes, capture
from ._context import context
from ._dist_tensor import PLAN_LIMIT, PLANS, DistTensor, Run, exact_signature
from ._errors import MixedMeshError, OperationError, PlainInBackwardError
from ._explain import Decided, note, recording
from ._lists import is_of_lists, plan_lists
from ._out import into_targets, targets_in
from ._outside import plan_outside
from ._plan import Drawn, Inline, Step, is_constant, leaves_nothing, makes_views, plan_call
from ._registry import DIRECT, HANDLERS
from ._run import replaying, run_direct, run_drawn, run_graph, run_identity, run_inline, run_step, run_twin
from ._tree import leaves_in, tensors_in
from ._whole import tell_whole
from .torch_hooks import backward_running, positional

HANDLING = (_functions, _handle_data, _handle_gradients, _handle_lists, _handle_random, _handle_values)
"""The files whose import fills HANDLERS, or has users' functions told."""

_VALUED: set[Any] = set()
"""Signatures whose plans depend on the values of floats."""


def dispatch(func: Any, types: Any, args: Any, kwargs: Any, key: Any) -> Any:
    """Carries out `func(*args, **kwargs)`, some of whose tensors are distributed; `key` is its signature."""
    direct = DIRECT.get(func)
    if direct is not None:
        if key is not None:
            PLANS[key] = direct
        return direct(func, types, args, kwargs)
    kwargs = kwargs or {}
    handler = HANDLERS.get(func)
    tensors = list(tensors_in((args, kwargs)))
    views = [t for t in tensors if type(t) is DistView]
    before = before_call(views)
    targets = targets_in(func, kwargs)
    out = into_targets(func, args, kwargs, targets) if targets else NotImplemented
    if out is NotImplemented and handler is not None:
        out = handler(func, types, *positional(func, args, kwargs))
    if out is NotImplemented:
        out = _carry_out(func, types, args, kwargs, tensors, key)
    if views:
        after_call(views, before, out)
    return out


def _carry_out(func: Any, types: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], key: Any) -> Any:
    if is_of_lists(func):
        run, captured = plan_lists(func, args, kwargs, tensors)
        pending = any(isinstance(t, DistTensor) and t._spec.layout.partial for t in tensors)
        by_value = captured is not None and (pending or _has_computed_rule(captured))
        _remember(func, args, kwargs, key, run, by_value)
        return run(func, types, args, kwargs)
    mesh = _common_mesh(func, tensors)
    if any(not isinstance(t, DistTensor) for t in tensors):
        _guard_backward(func, tensors)
    if any(isinstance(t, Absent) for t in tensors):
        run, by_value = plan_outside(func, args, kwargs, tensors)
    else:
        run, by_value = make_plan(func, args, kwargs, mesh)
    _remember(func, args, kwargs, key, run, by_value)
    return run(func, types, args, kwargs)


def _remember(func: Any, args: Any, kwargs: Any, key: Any, run: Run, by_value: bool) -> None:
    if key is None or recording():
        return
    if len(PLANS) >= PLAN_LIMIT:
        PLANS.clear()
        _VALUED.clear()
    exact = exact_signature(func, args, kwargs) if by_value or key in _VALUED else None
    if exact is not None and exact[1]:
        _VALUED.add(key)
        PLANS[key], key = _valued(key), exact
    PLANS[key] = run


def _valued(key: Any) -> Run:
    """Looks for the plan of a call by the values of its floats, too."""

    def run(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        plan = PLANS.get(exact_signature(func, args, kwargs))
        return (plan or partial(dispatch, key=key))(func, types, args, kwargs)

    return run


def _common_mesh(func: Any, tensors: Sequence[Tensor]) -> ProcessMesh:
    specs = [t._spec for t in tensors if isinstance(t, DistTensor)]
    mesh = specs[0].mesh
    for spec in specs:
        if spec.mesh is not mesh:
            raise MixedMeshError(
                f"{name_of(func)} of tensors on two meshes", f"{specs[0]!r} on {mesh!r} and {spec!r} on {spec.mesh!r}",
                "an operation runs on one mesh", "mw.reshard(x, mesh, placements) to bring one of them over",
            )  # fmt: skip
    return mesh


def _guard_backward(func: Any, tensors: Sequence[Tensor]) -> None:
    """Inside a backward pass a plain tensor may be this rank's part of a gradient: refuse rather than guess."""
    if backward_running() == -1:
        return
    for t in tensors:
        if isinstance(t, DistTensor):
            continue
        if not torch.is_grad_enabled() or (t.requires_grad and not t.is_leaf):
            raise PlainInBackwardError(
                f"{name_of(func)} inside a backward pass", "a plain tensor beside a distributed one",
                "it may be this rank's part of a gradient, or a whole value: nothing tells which",
                "save tensors that come from arguments in the autograd.Function, or wrap it with mw.local_map",
            )  # fmt: skip


def name_of(func: Any) -> str:
    """The name a user knows `func` by."""
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return str(name)


def make_plan(func: Any, args: Any, kwargs: Any, mesh: ProcessMesh) -> tuple[Run, bool]:
    """How the call is carried out, and whether floats among its arguments count by value."""
    try:
        captured = capture(func, args, kwargs, lambda t: t._spec if isinstance(t, DistTensor) else None)
    except Exception as error:  # torch raises many kinds: data-dependent, no meta kernel, or the user's own mistake
        return _on_whole(func, str(error).split("\n")[0], failed=True), False
    if is_constant(captured):
        return lambda *_: captured.out, False
    if not captured.nodes and any(callable(x) for x in leaves_in((args, kwargs))):
        return _on_whole(func, "it calls a Python function with numbers, which a capture does not see"), False
    tensors = tensors_in((args, kwargs))
    specs = {id(m): t._spec for m, t in zip(captured.inputs, tensors, strict=True) if isinstance(t, DistTensor)}
    found = plan_call(captured, specs, mesh)
    if isinstance(found, Captured):
        captured, found = found, found.nodes
    if _is_direct(found) and asks_sizes(func, args, kwargs, captured, tuple(specs.values())):
        found = replace(found, direct=False) if isinstance(found, Step) else captured.nodes
    _tell(func, captured, found, tuple(specs.values()))
    run, by_value = _closed(func, args, kwargs, captured, found)
    if isinstance(found, Step) and found.context is not None:
        run = _by_context(run, mesh)
    by_value = by_value or _has_computed_rule(captured)  # norm(x, 0.0) has another rule than 2.0
    if any(leaves_nothing(s) for s in specs.values()) and makes_views(captured):
        run = replaying(run)
    return run, by_value


def _has_computed_rule(captured: Captured) -> bool:
    """True if the rule of an operator depends on the values of numbers."""
    return any(is_computed(n.op) for n in captured.nodes)


def _by_context(run: Run, mesh: ProcessMesh) -> Run:
    """`run`, planned as attention is to go now, and plans for how it is to go at other times."""
    plans = {context(): run}

    def chosen(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        now = context()
        if now not in plans:
            plans[now], _ = make_plan(func, args, kwargs or {}, mesh)
        return plans[now](func, types, args, kwargs)

    return chosen


def _is_direct(found: Any) -> bool:
    """True when the plan is to call the caller's own function on parts."""
    if isinstance(found, Step):
        return found.direct
    return type(found) is tuple and bool(found) and isinstance(found[0], Spec)


def _closed(func: Any, args: Any, kwargs: Any, captured: Captured, found: Any) -> tuple[Run, bool]:
    if found is None:
        run = run_twin(captured.nodes[0], captured)
        return (run, True) if run is not None else (_on_whole(func, "it has no rule"), False)
    if isinstance(found, Step):
        return run_step(found, func, args, kwargs), not found.direct or found.grown
    if isinstance(found, Drawn):
        return run_drawn(found), False
    if isinstance(found, Inline):
        return run_inline(found, captured), True
    if not captured.nodes:
        return run_identity(captured), False
    if found is captured.nodes:
        return run_graph(captured), True
    plain = any(not isinstance(t, DistTensor) for t in tensors_in(args))
    return run_direct(found, captured.out, plain), False


def _on_whole(func: Any, why: str, failed: bool = False) -> Run:
    """The whole tensors on every rank: never wrong, told once by name."""

    def run(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            out = run_whole(func, args, kwargs or {})
        except RuntimeError as error:
            if not failed or isinstance(error, MeshwrightError):
                raise
            raise _refused(func, args, kwargs, error) from error
        tell_whole(name_of(func), why)
        return out

    return run


def _refused(func: Any, args: Any, kwargs: Any, error: RuntimeError) -> OperationError:
    specs = ", ".join(repr(t._spec) if isinstance(t, DistTensor) else f"plain {tuple(t.shape)}"
                      for t in tensors_in((args, kwargs or {})))  # fmt: skip
    return OperationError(
        name_of(func), specs, str(error).split("\n")[0],
        "operands that one device would take: the shapes above are those of the whole tensors",
    )  # fmt: skip


def _tell(func: Any, captured: Captured, found: Any, ins: Any) -> None:
    if not recording():
        return
    moves = found.moves if isinstance(found, Step) else ()
    outs = found.outs if isinstance(found, (Step, Drawn)) else found if found and found is not captured.nodes else ()
    how = (
        "whole"
        if found is None or isinstance(found, Drawn)
        else "parts"
        if isinstance(found, Inline)
        else "operators"
        if found is captured.nodes
        else _local_how(found)
    )
    note(Decided(name_of(func), ins, moves, tuple(outs) if not isinstance(outs, Inline) else (), how))


def _local_how(found: Any) -> str:
    """How a call that runs on parts does so; attention may say more."""
    return found.context if isinstance(found, Step) and found.context in ("ring", "ulysses") else "local"


DistTensor._dispatch = staticmethod(dispatch)
on_new_rule.append(PLANS.clear)
