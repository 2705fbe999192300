"""Planning of a call: capture it, decide its layouts, and close over the remaining work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from meshwright.comm import Communicator, current_communicator
from meshwright.layout import Layout, ProcessMesh, Spec, TorchValue, hint, local_shape, replicated
from meshwright.spmd import Alternative, OperatorCall, RuleError, describe, random_operator_rule, split_sharded_products

from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..capture.call_capture import Captured, CapturedNode, reads_uninitialised, strides_of, taken_apart
from ..conversion.convert import Move, move
from ..core.tree import leaves_in, map_leaves, map_tensors, tensors_in
from ..torch_hooks import Operator, no_interception, shares_storage, written_arguments
from .attention_algorithm import Context, attention_algorithm
from .layout_decision import Decision, decide
from .local_call import PlannedLocalCall
from .operand_reads import reading_all_operands


@dataclass(frozen=True, slots=True)
class Ref:
    """Placeholder for the call's `at`-th tensor argument, in order of appearance."""

    at: int


@dataclass(frozen=True, slots=True)
class Step:
    """One operator on local tensors: the conversions of its operands, and the specs of its results.

    Attributes:
        moves: Pairs of the number of a tensor argument and the conversion of this argument.
        direct: True if the caller's own function may be called, since only its operands change.
        broken: The number of the tensor argument that the results are views of, if it has to be converted; else None.
        single: True unless one autograd node makes several such results.
        grown: True if a result has a dim that no operand has; values may decide the size of this dim.
        fresh: For each result that the schema lets alias an argument, True if it is new and False if it is an alias.
        context: The algorithm of attention along a sharded sequence; None for other operators.
    """

    node: CapturedNode
    args: Arguments
    kwargs: NamedArguments
    moves: tuple[tuple[int, Move], ...]
    outs: tuple[Spec, ...]
    direct: bool
    sizes: tuple[int | str, ...]
    form: TorchFunction | None
    ins: tuple[Spec | None, ...]
    broken: int | None
    single: bool
    grown: bool
    fresh: tuple[bool | None, ...]
    context: Context | None = None

    def local_arguments(self, tensors: Sequence[Tensor], here: Communicator) -> tuple[Arguments, NamedArguments]:
        """Return the operator's arguments with these local tensors, and with local sizes."""
        args = tuple(_fill(a, tensors) for a in self.args)
        kwargs = {k: _fill(v, tensors) for k, v in self.kwargs.items()}
        for key in self.sizes:
            local = list(here.local_shape(self.outs[0]))
            if isinstance(key, int) and key < len(args):
                args = (*args[:key], local, *args[key + 1 :])
            elif isinstance(key, str) and key in kwargs:
                kwargs[key] = local
        return args, kwargs

    def call(self, here: Communicator) -> PlannedLocalCall:
        """Return the view of the call for a local form."""
        return PlannedLocalCall(self.ins, self.outs, here)


def _fill(value: TorchValue, tensors: Sequence[Tensor]) -> TorchValue:
    if isinstance(value, Ref):
        return tensors[value.at]
    if type(value) is list or type(value) is tuple:
        return type(value)(_fill(v, tensors) for v in value)
    if isinstance(value, torch.device) and value.type == "meta":  # the call was captured there
        return tensors[0].device
    return value


@dataclass(frozen=True, slots=True)
class NestedCalls:
    """The call is the Python function `parts`, which consists of operations with their own plans."""

    parts: TorchFunction
    node: CapturedNode


@dataclass(frozen=True, slots=True)
class RandomWhole:
    """The call draws numbers that depend on its operands' values: it runs on whole tensors, as on one device.

    Every rank keeps its part of the results, which have these specs.
    """

    outs: tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The caller's own function runs on the local tensors as they are, and its results have these specs."""

    outs: tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class OneByOne:
    """The operators run one by one on distributed tensors.

    They are other operators than the captured ones if torch's decomposition of a single operator runs instead of it.
    """

    captured: Captured


OperatorPlan: TypeAlias = Step | NestedCalls | RandomWhole | Unchanged | OneByOne
"""The plan of the operators of a call."""


def plan_node(
    node: CapturedNode, specs: Mapping[int, Spec], mesh: ProcessMesh, inputs: Sequence[Tensor]
) -> Step | NestedCalls | None:
    """Return the plan of one captured operator on `mesh`; None if it must run on whole tensors.

    `specs` maps ids of meta tensors to the specs of their distributed tensors; other tensors are replicated.
    """
    call = _call_of(node, ones=any(map(_shards_one, specs.values())) and _is_view(node))
    if call is None or _writes_elsewhere(node, call):
        return None
    problem = _problem(node, call, specs, mesh, inputs)
    if all(s is None for s in problem.specs):
        return None
    layouts = [s.layout if s is not None else None for s in problem.specs]
    call = replace(call, bound=split_sharded_products(call.bound, layouts))
    decision = _decision_of(call, problem.specs)
    if decision is None:
        return None
    if decision.gathers and call.rule.parts is not None:
        return NestedCalls(call.rule.parts, node)
    return _attention_step(problem, call, decision) if call.rule.alternatives else _step(problem, call, decision)


@dataclass(frozen=True, slots=True)
class _Problem:
    """An operator to plan on a mesh, the tensors of its call, and the operands of its rule with their specs."""

    node: CapturedNode
    mesh: ProcessMesh
    inputs: Sequence[Tensor]
    operands: Sequence[Tensor | None]
    specs: Sequence[Spec | None]


def _problem(
    node: CapturedNode, call: OperatorCall, specs: Mapping[int, Spec], mesh: ProcessMesh, inputs: Sequence[Tensor]
) -> _Problem:
    operands = call.operands(node.args, node.kwargs)
    return _Problem(node, mesh, inputs, operands, _operand_specs(operands, specs, mesh))


def _operand_specs(
    operands: Sequence[Tensor | None], specs: Mapping[int, Spec], mesh: ProcessMesh
) -> list[Spec | None]:
    return [_spec_of(x, specs, mesh) if x is not None else None for x in operands]


def _call_of(node: CapturedNode, ones: bool = False) -> OperatorCall | None:
    """Return the operator bound to its rule; None if there is no rule, or its shapes do not fit."""
    try:
        return describe(node.op, *map_leaves(_hinted, (node.args, node.kwargs)), ones=ones)
    except RuleError:
        return None


def _attention_step(problem: _Problem, call: OperatorCall, decision: Decision) -> Step | None:
    """Return the step of attention by the algorithm that the caller chose, or by "gather" if that does not fit."""
    asked, taken = attention_algorithm(), None
    if decision.gathers and asked in call.rule.alternatives:
        taken = _alternative(problem, call.rule.alternatives[asked])
    step = _step(problem, *(taken or (call, decision)))
    return None if step is None else replace(step, context=asked if taken else "gather")


def _shards_one(spec: Spec) -> bool:
    """True if a dim of size 1 is sharded. Operators gather such a dim, unless their results are views."""
    return any(dim and isinstance(n, int) and n == 1 for n, dim in zip(spec.shape, spec.layout.dims, strict=True))  # pyright: ignore[reportUnnecessaryIsInstance] - symbolic


def _is_view(node: CapturedNode) -> bool:
    """True if a result is an operand, or a view of one, and the operator writes to nothing."""
    if is_written(node.op):
        return False
    return any(shares_storage(x, r) for x in tensors_in((node.args, node.kwargs)) for r in tensors_in(node.out))


def _decision_of(call: OperatorCall, specs: Sequence[Spec | None]) -> Decision | None:
    """Return the decision for operands whose sizes may be symbolic; it is made for the hints of the sizes."""
    decision = decide(call, [s.concrete if s is not None else None for s in specs])
    if decision is None or not any(s is not None and s.is_symbolic for s in specs):
        return decision
    ins = [s.with_layout(d.layout) if s and d else d for s, d in zip(specs, decision.ins, strict=True)]
    return replace(decision, ins=tuple(ins))


def _alternative(problem: _Problem, other: Alternative) -> tuple[OperatorCall, Decision] | None:
    """Return the call with another rule; None if that rule gathers an operand too, or its form does not fit."""
    node = problem.node
    call = describe(node.op, *map_leaves(_hinted, (node.args, node.kwargs)), alternative=other.rule)
    decision = _decision_of(call, problem.specs) if call is not None else None
    if call is None or decision is None or decision.gathers or decision.form is None:
        return None
    return (call, decision) if other.fits(PlannedLocalCall(decision.ins, (), current_communicator())) else None


def _hinted(x: TorchValue) -> TorchValue:
    """Return a leaf of the arguments with symbolic sizes replaced by their hints; decisions are made for the hints."""
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        return x.node.hint
    if isinstance(x, Tensor) and any(isinstance(n, torch.SymInt) for n in x.shape):
        return torch.empty([hint(n) for n in x.shape], dtype=x.dtype, device="meta")
    return x


def _spec_of(x: Tensor, specs: Mapping[int, Spec], mesh: ProcessMesh) -> Spec:
    found = specs.get(id(x))
    return found if found is not None else Spec(mesh, replicated(x.dim()), x.shape, x.dtype, strides_of(x))


def _writes_elsewhere(node: CapturedNode, call: OperatorCall) -> bool:
    """True if the operator writes to a tensor that is no operand of the rule."""
    return len(written_arguments(node.op)) > len(call.mutated)


def _step(problem: _Problem, call: OperatorCall, decision: Decision) -> Step | None:
    """Return the step of the operator with these layouts; None if the results have other dims than its rule says."""
    node, results = problem.node, list(tensors_in(problem.node.out))
    layouts = decision.outs if len(decision.outs) == len(results) else decision.outs * len(results)
    if [lay.ndim for lay in layouts] != [r.dim() for r in results]:
        return None
    outs = _result_specs(layouts, results, problem.mesh)
    numbers = {id(t): i for i, t in enumerate(problem.inputs)}
    args, kwargs = map_tensors(lambda t: Ref(numbers[id(t)]), (node.args, node.kwargs))
    moves = _operand_moves(problem, decision, numbers)
    form = _local_form(call, decision, outs)
    sizes = call.rule.sizes if any(o.layout.cut_axes for o in outs) else ()
    broken = _broken_view(problem, moves)
    return Step(
        node=node,
        args=args,
        kwargs=kwargs,
        moves=moves,
        outs=outs,
        direct=form is None and not sizes,
        sizes=sizes,
        form=form,
        ins=decision.ins,
        broken=broken,
        single=broken is None or len(results) < 2 or not _in_one_node(node),
        grown=_has_new_dim(call, results),
        fresh=fresh_results(node),
    )


def _result_specs(layouts: Sequence[Layout], results: Sequence[Tensor], mesh: ProcessMesh) -> tuple[Spec, ...]:
    return tuple(Spec(mesh, lay, r.shape, r.dtype, strides_of(r)) for lay, r in zip(layouts, results, strict=True))


def _operand_moves(problem: _Problem, decision: Decision, numbers: Mapping[int, int]) -> tuple[tuple[int, Move], ...]:
    """Return the conversions of operands, each with the number of its tensor; `numbers` maps ids to these numbers."""
    return tuple(
        (numbers[id(x)], move(have, need))
        for x, have, need in zip(problem.operands, problem.specs, decision.ins, strict=True)
        if x is not None and have is not None and need is not None and have is not need
    )


def _local_form(call: OperatorCall, decision: Decision, outs: Sequence[Spec]) -> TorchFunction | None:
    """Return the function that replaces the operator on local tensors; None if the operator itself is right."""
    form = call.rule.forms[decision.form] if decision.form else None
    if not any(leaves_nothing(s) for s in (*decision.ins, *outs)):
        return form
    form = form or call.rule.guard
    return None if form is None else reading_all_operands(form)


def fresh_results(node: CapturedNode) -> tuple[bool | None, ...]:
    """Return one flag for each result that the schema lets alias an argument: True if new, False if an alias."""
    results = list(tensors_in(node.out))
    if not may_alias(node.op):
        return (None,) * len(results)
    given = list(tensors_in((node.args, node.kwargs)))
    return tuple(not any(r is t or shares_storage(r, t) for t in given) for r in results)


def may_alias(op: Operator) -> bool:
    """True if the schema lets a result alias an argument that the operator does not write to."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def _has_new_dim(call: OperatorCall, results: Sequence[Tensor]) -> bool:
    """True if a result has a dim that is no factor of an operand, so that its size comes from elsewhere."""
    pairs = zip(call.bound.outs, results, strict=False)
    return any(not dim and n != 1 for dims, r in pairs for dim, n in zip(dims, r.shape, strict=True))


def leaves_nothing(spec: Spec | None) -> bool:
    """True if the last rank along some dim holds no piece of it."""
    if spec is None or spec.is_symbolic:
        return False
    last = {a: n - 1 for a, n in spec.mesh.sizes.items()}
    local = local_shape(spec.shape, spec.layout, spec.mesh.sizes, last)
    return any(here == 0 != whole for here, whole in zip(local, spec.shape, strict=True))


def _is_unsafe(op: Operator) -> bool:
    """True for operators called unsafe: their aliases are not guaranteed, and autograd sees no views."""
    return op.name().startswith(("aten::unsafe_", "aten::_unsafe_"))


def _broken_view(problem: _Problem, moves: Sequence[tuple[int, Move]]) -> int | None:
    """Return the number of the tensor that the results share memory with on one device, if it has to move."""
    if _is_unsafe(problem.node.op):
        return None
    moved = [number for number, how in moves if not how.is_trivial]
    results = list(tensors_in(problem.node.out))
    return next((n for n in moved for r in results if shares_storage(problem.inputs[n], r)), None)


def of_one_node(results: Sequence[Tensor]) -> bool:
    """True if one autograd node made several of the results; torch raises an error on a write to such views."""
    if len(results) < 2 or not torch.is_grad_enabled():
        return False
    with no_interception():
        nodes = [r.grad_fn for r in results if r.grad_fn is not None]
    return len({id(n) for n in nodes}) < len(nodes)


def _in_one_node(node: CapturedNode) -> bool:
    """True if one autograd node makes several results of the operator; found by a call that records gradients."""

    def wanting(x: Tensor) -> Tensor:
        return x.detach().requires_grad_(x.is_floating_point() or x.is_complex())

    with torch.enable_grad():
        args, kwargs = map_tensors(wanting, (node.args, node.kwargs))
        return of_one_node(list(tensors_in(node.op(*args, **kwargs))))


def plan_call(captured: Captured, specs: Mapping[int, Spec], mesh: ProcessMesh) -> OperatorPlan | None:
    """Return the plan of a captured call; None to run the call on whole tensors."""
    if len(captured.nodes) == 1 and _is_whole_call(captured):
        node = replace(captured.nodes[0], out=captured.out)
        apart = taken_apart(captured) if _is_hidden_view(captured) else None
        if apart is not None:
            return OneByOne(apart)
        found = plan_node(node, specs, mesh, captured.inputs) or _random_whole(node, specs, mesh)
        if found is not None or is_written(node.op):
            return found
        apart = taken_apart(captured)
        return None if apart is None else OneByOne(apart)
    if reads_uninitialised(captured):
        return None
    outs = unchanged(captured, specs, mesh)
    return OneByOne(captured) if outs is None else Unchanged(outs)


def _random_whole(node: CapturedNode, specs: Mapping[int, Spec], mesh: ProcessMesh) -> RandomWhole | None:
    """Return the layouts of the results of an operator that draws; None for other operators."""
    rule = random_operator_rule(node.op, node.args, node.kwargs)
    call = describe(node.op, node.args, node.kwargs, rule) if rule is not None else None
    if call is None or _writes_elsewhere(node, call):
        return None
    operands = call.operands(node.args, node.kwargs)
    decision, results = _decision_of(call, _operand_specs(operands, specs, mesh)), list(tensors_in(node.out))
    if decision is None or len(decision.outs) != len(results):
        return None
    return RandomWhole(_result_specs(decision.outs, results, mesh))


def _is_whole_call(captured: Captured) -> bool:
    """True if the only operator takes the call's tensors and returns the call's results."""
    node = captured.nodes[0]
    known = {id(t) for t in captured.inputs}
    used = {id(t) for t in tensors_in((node.args, node.kwargs))}
    same = [id(t) for t in tensors_in(captured.out)] == [id(t) for t in tensors_in(node.out)]
    return used <= known and same


def unchanged(captured: Captured, specs: Mapping[int, Spec], mesh: ProcessMesh) -> tuple[Spec, ...] | None:
    """Return the specs of the results if every operator runs on the local tensors as they are, else None.

    An operator may only write to an argument of the call, and this argument must keep its layout.
    """
    known, inputs = dict(specs), {id(t) for t in captured.inputs}
    for node in captured.nodes:
        step = plan_node(node, known, mesh, list(tensors_in((node.args, node.kwargs))))
        if not isinstance(step, Step) or step.moves or not step.direct:
            return None
        if is_written(node.op) and not _writes_argument(node, step, inputs, known, mesh):
            return None
        known.update({id(t): s for t, s in zip(tensors_in(node.out), step.outs, strict=True)})
    return tuple(_spec_of(t, known, mesh) for t in tensors_in(captured.out))


def _writes_argument(
    node: CapturedNode, step: Step, inputs: set[int], known: Mapping[int, Spec], mesh: ProcessMesh
) -> bool:
    """True if the operator writes to its first operand, which is an argument of the call and keeps its layout."""
    target = node.args[0]
    return (
        isinstance(target, Tensor)
        and node.out is target
        and id(target) in inputs
        and step.outs[0].layout == _spec_of(target, known, mesh).layout
    )


SETTING = frozenset(
    {
        torch.ops.aten.zero_.default,
        torch.ops.aten.fill_.Scalar,
        torch.ops.aten.fill_.Tensor,
        torch.ops.aten.copy_.default,
    }
)
"""Operators that write without reading the old value."""


def is_written(op: Operator) -> bool:
    """True for an operator that writes to one of its operands."""
    return bool(written_arguments(op))


def writes_overlapping(captured: Captured) -> bool:
    """True if the call writes to an argument whose elements share memory; torch refuses most such calls."""
    return any(0 in x.stride() and x.numel() for x in written_inputs(captured))


def written_inputs(captured: Captured) -> list[Tensor]:
    """Return the captured arguments that the call writes to."""
    written = {id(t) for n in captured.nodes for t in _tensors_written(n)}
    return [x for x in captured.inputs if id(x) in written]


def _tensors_written(node: CapturedNode) -> list[Tensor]:
    """Return the tensors that the node writes to, by its schema."""
    names = {a.name for a in written_arguments(node.op)}
    positions = zip(node.op._schema.arguments, node.args, strict=False)
    given = [v for a, v in positions if a.name in names] + [v for k, v in node.kwargs.items() if k in names]
    return list(tensors_in(given))


def makes_views(captured: Captured) -> bool:
    """True if a result shares the memory of an argument."""
    return any(shares_storage(t, r) for t in captured.inputs for r in tensors_in(captured.out))


def _is_hidden_view(captured: Captured) -> bool:
    """True if the only operator returns a view that its schema does not declare, as `einsum("ij->ji", x)` does.

    Ranks may differ in whether their part gives a view. Operators whose schemas declare views always give one.
    """
    op, inputs = captured.nodes[0].op, {id(t) for t in captured.inputs}
    if may_alias(op) or is_written(op) or _is_unsafe(op) or not makes_views(captured):
        return False
    return not inputs.issuperset(id(r) for r in tensors_in(captured.out))


def is_view_of_plain(captured: Captured, is_distributed: Sequence[bool]) -> bool:
    """True if each result shares memory with a plain argument.

    The distributed ones then only provide a shape or a dtype.
    """
    results, flags = list(tensors_in(captured.out)), list(is_distributed)
    if all(flags) or not results or any(is_written(node.op) for node in captured.nodes):
        return False
    plain = [t for t, flag in zip(captured.inputs, flags, strict=True) if not flag]
    return all(any(shares_storage(r, t) for t in plain) for r in results)


def returns_arguments(captured: Captured, args: Arguments, kwargs: NamedArguments) -> bool:
    """True if the call only returns some of its arguments, as `x.float()` of a float32 tensor does.

    Meta tensors do not show a copy to another device. So the answer is False if an argument may name a device, or if
    the tensors are on several devices.
    """
    known, results = {id(t) for t in captured.inputs}, [id(r) for r in tensors_in(captured.out)]
    if not results or not known.issuperset(results) or any(is_written(node.op) for node in captured.nodes):
        return False
    if any(isinstance(x, (str, torch.device)) for x in leaves_in((args, kwargs))):
        return False
    return len({t.device for t in tensors_in((args, kwargs))}) == 1


def numbers_decide(node: CapturedNode, specs: Mapping[int, Spec], mesh: ProcessMesh) -> bool:
    """True if a number among the arguments may affect the layouts of the operator's results.

    Pending sums pass a product with a number that is small enough. An operator that writes keeps the layout of its
    target.
    """
    call = _call_of(node)
    if call is None:
        return False
    operands = call.operands(node.args, node.kwargs)
    deciding = [operands[i] for i in call.mutated] or operands
    pending = any(_spec_of(x, specs, mesh).layout.partial for x in deciding if x is not None)
    return pending or (call.bound.is_contraction and not call.mutated)


def is_constant(captured: Captured) -> bool:
    """True if the call returned no tensor and wrote to none, so that its result follows from shapes and dtypes."""
    return not any(is_written(n.op) for n in captured.nodes) and not any(True for _ in tensors_in(captured.out))
