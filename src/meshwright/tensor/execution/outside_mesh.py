"""Execution of a call on a rank outside the mesh: the specs of its results are known, their elements are not here."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import ProcessMesh, Spec, TorchValue

from .._errors import AbsentError
from .._torch_call import TorchFunction
from ..capture.call_capture import Captured, CapturedNode, autocast_dtype
from ..capture.gradient_paths import Paths, gradient_paths
from ..capture.metadata_check import check_meta_result
from ..capture.trial_calls import dtypes_given
from ..conversion.local_parts import spec_of_whole
from ..conversion.python_values import gather_everywhere
from ..conversion.stage_order import stages_of, written_tensors
from ..core.absent_tensor import Absent, link, make_absent
from ..core.computation_numbers import note_drawing
from ..core.dist_tensor import DistTensor
from ..core.function_names import name_of
from ..core.tree import map_tensors, tensors_in
from ..planning.call_plan import (
    NestedCalls,
    OneByOne,
    OperatorPlan,
    RandomWhole,
    is_constant,
    is_view_of_plain,
    is_written,
    returns_arguments,
    written_inputs,
)
from ..torch_hooks import no_interception, no_modes, operators_recorded, seeded_tag, shares_storage
from .captured_call import CapturedCall, capture_call, plan_captured, result_specs
from .run_plan import CallPlan, ConstantResult, OperatorSequence, PlainMemory, SmallerParts, real_inputs


def plan_outside(func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> CallPlan:
    """Return the plan of `func` if no operand has elements, for these values of floats.

    Results have the same specs as on the mesh's ranks, and no elements. The dtypes of results under autocast and the
    default dtype are part of a plan here; on other ranks the local results have these dtypes.
    """
    return _PlanByDtypes({_dtype_settings(args, kwargs): _plan_for_settings(func, args, kwargs)})


@dataclass(frozen=True, slots=True)
class _PlanByDtypes(CallPlan):
    """A call with a plan for each dtype of autocast and each default dtype."""

    plans: dict[tuple[torch.dtype | None, torch.dtype], CallPlan]

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        now, plans = _dtype_settings(args, kwargs), self.plans
        if now not in plans:
            plans[now] = _plan_for_settings(func, args, kwargs or {})
        return plans[now].run(func, types, args, kwargs)


def _dtype_settings(args: TorchValue, kwargs: TorchValue) -> tuple[torch.dtype | None, torch.dtype]:
    return autocast_dtype(tensors_in((args, kwargs))), torch.get_default_dtype()


def _plan_for_settings(func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> CallPlan:
    mesh = _mesh_of(args, kwargs)
    try:
        call = capture_call(func, args, kwargs)
    except Exception as error:
        shown = _result_of_zeros(func, args, kwargs)
        return _ResultOfStage(mesh, error) if shown is None else _ResultLike(shown, mesh)
    captured = call.captured
    if returns_arguments(captured, args, kwargs):
        captured = replace(captured, nodes=())
    if is_constant(captured):
        check_meta_result(func, args, kwargs, captured.out)
        return ConstantResult(captured.out)
    if is_view_of_plain(captured, [isinstance(t, DistTensor) for t in call.tensors]):
        return PlainMemory()
    captured, plan = plan_captured(captured, call.specs, mesh)
    if isinstance(plan, NestedCalls):
        return SmallerParts(plan, captured)
    if isinstance(plan, OneByOne):
        return OperatorSequence(captured)
    specs, paths = _planned_specs(call, captured, plan, mesh), gradient_paths(func, args, kwargs)
    return _ResultWithoutElements(
        captured, specs, paths, isinstance(plan, RandomWhole), written_inputs(captured), _bases(captured)
    )


def _bases(captured: Captured) -> list[int | None]:
    """Return for each result the place of the operand that it is a view of; None for other results."""
    return [
        next((at for at, x in enumerate(captured.inputs) if shares_storage(x, result)), None)
        for result in tensors_in(captured.out)
    ]


def _mesh_of(args: TorchValue, kwargs: TorchValue) -> ProcessMesh:
    return next(t._spec.mesh for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor))


def _planned_specs(
    call: CapturedCall, captured: Captured, plan: OperatorPlan | None, mesh: ProcessMesh
) -> tuple[Spec, ...]:
    """Return the specs of the results, with the dtypes of the current autocast."""
    specs = result_specs(plan) or tuple(spec_of_whole(t, mesh) for t in tensors_in(captured.out))
    in_autocast = autocast_dtype(call.tensors) is not None
    dtypes = dtypes_given(call.func, call.args, call.kwargs) if in_autocast else None
    if dtypes is None:
        return specs
    return tuple(s.with_dtype(dtype) for s, dtype in zip(specs, dtypes, strict=True))


@dataclass(frozen=True, slots=True)
class _ResultOfStage(CallPlan):
    """A call whose results depend on values; in a pipeline the stage that holds the values sends them.

    `error` is the reason why the call could not be captured.
    """

    mesh: ProcessMesh
    error: Exception

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        tensors = [t for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor)]
        if stages_of([self.mesh]) is None:
            raise AbsentError(
                f"{getattr(func, '__name__', func)} on a rank outside {self.mesh!r}",
                str(self.error).split("\n")[0],
                "the result depends on values that only the mesh's ranks hold",
                "first call mw.reshard(x, mesh, placements) with a mesh of all ranks",
            ) from self.error
        with torch.no_grad():
            values = {id(t): gather_everywhere(t.detach()) for t in tensors}
            with no_interception():
                whole_args, whole_kwargs = map_tensors(lambda t: values.get(id(t), t), (args, kwargs or {}))
                out = func(*whole_args, **whole_kwargs)
        found = written_tensors(name_of(func), args, kwargs or {})
        written = next((x for x in found if isinstance(x, DistTensor)), None)
        if written is not None:
            link(written, tensors)
            return written if any(out is x for x in values.values()) else out
        return _without_elements(out, tensors, tensors[0]._spec.mesh)


@dataclass(slots=True)
class SharedResult(CallPlan):
    """A call whose results depend on values; in a pipeline it also sends the operands to the other stages.

    `is_known` is True if the other stages know the result without the operands, and None before the first call there.
    """

    mesh: ProcessMesh
    plan: CallPlan
    is_known: bool | None = None

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        if self.mesh.size < current_communicator().size and stages_of([self.mesh]) is not None:
            if self.is_known is None:
                self.is_known = _result_of_zeros(func, args, kwargs) is not None
            if not self.is_known:
                _send_operands(args, kwargs)
        return self.plan.run(func, types, args, kwargs)


def _send_operands(args: TorchValue, kwargs: TorchValue) -> None:
    for t in tensors_in((args, kwargs)):
        if isinstance(t, DistTensor):
            gather_everywhere(t.detach())


def _result_of_zeros(func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the result of `func` for operands of zeros, for shapes that torch does not know without numbers.

    None if that fails too, if shapes depend on numbers, and if the function draws or writes.
    """
    zeros = _result_of_filled(0, func, args, kwargs)
    if zeros is None:
        return None
    ones = _result_of_filled(1, func, args, kwargs)
    return zeros if ones is not None and _shapes_in(zeros) == _shapes_in(ones) else None


def _shapes_in(tree: TorchValue) -> list[torch.Size]:
    return [t.shape for t in tensors_in(tree)]


def _result_of_filled(number: int, func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the result of `func` for distributed operands of one number; None if it fails, draws or writes."""
    nodes: list[CapturedNode] = []
    plain: list[Tensor] = []

    def filled(x: Tensor) -> Tensor:
        if not isinstance(x, DistTensor):
            plain.append(x.detach().clone())
            return plain[-1]
        spec = x._spec
        return torch.empty_strided(spec.shape, spec.full_strides, dtype=spec.dtype, device="cpu").fill_(number)

    with no_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            given = [map_tensors(filled, tree) for tree in (args, kwargs or {})]
            with operators_recorded(lambda *node: nodes.append(CapturedNode(*node))):
                out = func(*given[0], **given[1])
        except Exception:  # torch refuses zeros, in many ways
            return None
    known = {id(x) for x in plain}
    return None if any(is_written(node.op) or _depends_on_values(node, known) for node in nodes) else out


def _depends_on_values(node: CapturedNode, known: Set[int]) -> bool:
    """True if the form of the result depends on values of other tensors than those with these ids, or on draws."""
    if not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, seeded_tag}.intersection(node.op.tags):
        return False
    return seeded_tag in node.op.tags or any(id(x) not in known for x in tensors_in((node.args, node.kwargs)))


@dataclass(frozen=True, slots=True)
class _ResultLike(CallPlan):
    """A call whose results have the shapes of those shown, without elements.

    The values of plain operands, such as a mask, may decide the shapes, and differ from call to call.
    """

    shown: TorchValue
    mesh: ProcessMesh

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        tensors = list(tensors_in((args, kwargs)))
        has_plain = any(not isinstance(t, DistTensor) for t in tensors)
        shown = _result_of_zeros(func, args, kwargs) if has_plain else self.shown
        return _without_elements(self.shown if shown is None else shown, tensors, self.mesh)


def _without_elements(out: TorchValue, tensors: Sequence[Tensor], mesh: ProcessMesh) -> TorchValue:
    """Return tensors with the shapes of `out` without elements, replicated on the mesh.

    Results of whole tensors have this layout too.
    """
    specs = [spec_of_whole(t, mesh) for t in tensors_in(out)]
    made = iter(make_absent(specs, tensors))
    return map_tensors(lambda _: next(made), out)


@dataclass(frozen=True, slots=True)
class _ResultWithoutElements(CallPlan):
    """A planned call: its results have these specs and no elements, and are behind their operands for autograd.

    With `draws`, the ranks of the mesh draw whole results. `written` are the operands that the call writes to, and
    `bases` has the place of the operand that each result is a view of.
    """

    captured: Captured
    outs: tuple[Spec, ...]
    paths: Paths | None
    draws: bool
    written: Sequence[Tensor]
    bases: Sequence[int | None]

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        tensors = list(tensors_in((args, kwargs)))
        if self.draws:
            note_drawing(tensors[0].device, None)
        _draw_along(self.captured, tensors[0].device)
        results = list(tensors_in(self.captured.out))
        real = real_inputs(self.captured, args, kwargs)
        for meta in self.written:
            link(real[id(meta)], tensors)
        new = [at for at, meta in enumerate(results) if id(meta) not in real]
        for at, result in _results_behind(new, self.outs, tensors, self.paths):
            base = self.bases[at]
            result._view_of = None if base is None else tensors[base]
            real[id(results[at])] = result
        return map_tensors(lambda meta: real[id(meta)], self.captured.out)


def _results_behind(
    places: Sequence[int], specs: Sequence[Spec], tensors: Sequence[Tensor], paths: Paths | None
) -> list[tuple[int, Absent]]:
    """Return the results at `places` without elements, each computed from the operands that it has a gradient for.

    Results with the same operands have one node of the autograd graph. Without `paths`, all results depend on all
    operands.
    """
    groups: dict[frozenset[int] | None, list[int]] = {}
    for at in places:
        groups.setdefault(None if paths is None else paths[at], []).append(at)
    found: list[tuple[int, Absent]] = []
    for path, group in groups.items():
        inputs = tensors if path is None else _with_gradients(tensors, path)
        found += zip(group, make_absent([specs[at] for at in group], inputs), strict=True)
    return found


def _with_gradients(tensors: Sequence[Tensor], path: frozenset[int]) -> list[Tensor]:
    """Return the tensors, of which only those at the indices in `path` get gradients."""
    return [t if at in path or not t.requires_grad else t.detach() for at, t in enumerate(tensors)]


def _draw_along(captured: Captured, device: torch.device) -> None:
    """Run random operators on this rank too, so that the generators of all ranks have the same state."""
    for node in captured.nodes:
        if seeded_tag in node.op.tags:
            with no_interception(), torch.no_grad():
                args, kwargs = map_tensors(lambda meta: _filled_with_halves(meta, device), (node.args, node.kwargs))
                node.op(*args, **kwargs)


def _filled_with_halves(meta: Tensor, device: torch.device) -> Tensor:
    if meta.is_floating_point():
        return torch.full(meta.shape, 0.5, dtype=meta.dtype, device=device)
    return torch.ones_like(meta, device=device)
