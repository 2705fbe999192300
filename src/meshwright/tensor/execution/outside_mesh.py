"""Execution of a call on a rank outside the mesh: the specs of its results are known, their elements are not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import ProcessMesh, Spec

from .._errors import AbsentError
from ..capture.call_capture import Captured, Node, autocast_dtype, capture
from ..capture.gradient_paths import Paths, gradient_paths
from ..capture.metadata_check import check_meta_result
from ..capture.trial_calls import dtypes_given
from ..conversion.local_parts import spec_of_whole
from ..conversion.python_values import gather_everywhere
from ..conversion.stage_order import stages_of, written_by
from ..core.absent_tensor import link, make_absent
from ..core.dist_tensor import DistTensor, Run
from ..core.function_names import name_of
from ..core.tree import map_tensors, tensors_in
from ..planning.call_plan import NestedCalls, RandomWhole, Step, is_constant, is_view_of_plain, is_written, plan_call
from ..torch_hooks import no_interception, no_modes, operators_recorded, seeded_tag
from .run_plan import run_graph, run_inline, run_plain


def plan_outside(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Run:
    """Return a function that carries out `func` if no operand has elements, for these values of floats.

    Results have the same specs as on the mesh's ranks, and no elements. The dtypes of results under autocast and the
    default dtype are part of a plan here; on other ranks the local results have these dtypes.
    """
    plans = {_dtype_settings(args, kwargs): _planned(func, args, kwargs, tensors)}

    def chosen(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        now = _dtype_settings(args, kwargs)
        if now not in plans:
            plans[now] = _planned(func, args, kwargs or {}, list(tensors_in((args, kwargs))))
        return plans[now](func, types, args, kwargs)

    return chosen


def _dtype_settings(args: Any, kwargs: Any) -> tuple[torch.dtype | None, torch.dtype]:
    return autocast_dtype(tensors_in((args, kwargs))), torch.get_default_dtype()


def _planned(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Run:
    like = next(t._spec for t in tensors if isinstance(t, DistTensor))
    try:
        captured = capture(func, args, kwargs, lambda t: t._spec if isinstance(t, DistTensor) else None)
    except Exception as error:
        out = _of_zeros(func, args, kwargs)
        if out is not None:
            return lambda func, types, args, kwargs: _like(out, list(tensors_in((args, kwargs))), like)
        return partial(_told, like.mesh, error)
    if is_constant(captured):
        check_meta_result(func, args, kwargs, captured.out)
        return lambda *_: captured.out
    if is_view_of_plain(captured, [isinstance(t, DistTensor) for t in tensors]):
        return run_plain
    specs = {id(m): t._spec for m, t in zip(captured.inputs, tensors, strict=True) if isinstance(t, DistTensor)}
    found = plan_call(captured, specs, like.mesh)
    if isinstance(found, Captured):
        captured, found = found, found.nodes
    if isinstance(found, NestedCalls):
        return run_inline(found, captured)
    if found is not None and found is captured.nodes:
        return run_graph(captured)
    known: Any = found.outs if isinstance(found, (Step, RandomWhole)) else found
    dtypes = None if autocast_dtype(tensors_in((args, kwargs))) is None else dtypes_given(func, args, kwargs)
    paths = gradient_paths(func, args, kwargs)

    def run(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _draw_along(captured)
        return _without_elements(captured, list(tensors_in((args, kwargs))), like, known, dtypes, paths)

    return run


def _told(mesh: ProcessMesh, error: Exception, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of a call that depend on values; in a pipeline the stage that holds the values sends them."""
    tensors = [t for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor)]
    if stages_of([mesh]) is None:
        raise AbsentError(
            f"{getattr(func, '__name__', func)} on a rank outside {mesh!r}",
            str(error).split("\n")[0],
            "the result depends on values that only the mesh's ranks hold",
            "first call mw.reshard(x, mesh, placements) with a mesh of all ranks",
        ) from error
    with torch.no_grad():
        values = {id(t): gather_everywhere(t.detach()) for t in tensors}
        with no_interception():
            out = func(*_valued(args, values), **_valued(kwargs or {}, values))
    written = written_by(name_of(func), tensors)
    if written is not None:
        link(written, tensors)
        return written if any(out is x for x in values.values()) else out
    return _like(out, tensors, tensors[0]._spec)


def _valued(tree: Any, values: Mapping[int, Tensor]) -> Any:
    return map_tensors(lambda t: values.get(id(t), t), tree)


def sharing_result(mesh: ProcessMesh, run: Run) -> Run:
    """Return `run`, a call whose results depend on values.

    In a pipeline it also sends the operands to the other stages.
    """
    known: list[bool] = []

    def told(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if mesh.size < current_communicator().size and stages_of([mesh]) is not None:
            if not known:
                known.append(_of_zeros(func, args, kwargs) is not None)
            for t in tensors_in((args, kwargs)) if not known[0] else ():
                if isinstance(t, DistTensor):
                    gather_everywhere(t.detach())
        return run(func, types, args, kwargs)

    return told


def _of_zeros(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of `func` for operands of zeros, for shapes that torch does not know without numbers.

    None if that fails too, if shapes depend on numbers, and if the function draws or writes.
    """
    found = [_of_fill(torch.zeros, func, args, kwargs)]
    found += [_of_fill(torch.ones, func, args, kwargs)] if found[0] is not None else []
    shapes = [None if out is None else [t.shape for t in tensors_in(out)] for out in found]
    return found[0] if shapes[0] == shapes[-1] else None


def _of_fill(fill: Any, func: Any, args: Any, kwargs: Any) -> Any:
    nodes: list[Node] = []

    def filled(x: Tensor) -> Tensor:
        return fill(x._spec.shape, dtype=x._spec.dtype) if isinstance(x, DistTensor) else x.detach().clone()

    with no_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            given = [map_tensors(filled, tree) for tree in (args, kwargs or {})]
            with operators_recorded(lambda *node: nodes.append(Node(*node))):
                out = func(*given[0], **given[1])
        except Exception:  # torch refuses zeros, in many ways
            return None
    unknown = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, seeded_tag)
    if any(is_written(n.op) or any(tag in n.op.tags for tag in unknown) for n in nodes):
        return None
    return out


def _like(out: Any, tensors: Sequence[Tensor], like: Spec) -> Any:
    """Return tensors with the shapes of `out` without elements, replicated on the mesh.

    Results of whole tensors have this layout too.
    """
    specs = [spec_of_whole(t, like.mesh) for t in tensors_in(out)]
    made = iter(make_absent(specs, tensors))
    return map_tensors(lambda _: next(made), out)


def _without_elements(
    captured: Captured,
    tensors: Sequence[Tensor],
    like: Spec,
    known: Sequence[Spec] | None,
    dtypes: Sequence[torch.dtype] | None,
    paths: Paths | None,
) -> Any:
    results = list(tensors_in(captured.out))
    specs = list(known or [spec_of_whole(t, like.mesh) for t in results])
    if dtypes is not None:
        specs = [s.with_dtype(dtype) for s, dtype in zip(specs, dtypes, strict=True)]
    real: dict[int, Tensor] = {id(m): t for m, t in zip(captured.inputs, tensors, strict=True)}
    for t in results:
        if id(t) in real and any(is_written(node.op) for node in captured.nodes):  # not x.to(x.dtype)
            link(real[id(t)], tensors)
    new = [at for at, t in enumerate(results) if id(t) not in real]
    real |= {id(results[at]): made for at, made in _made_behind(new, specs, tensors, paths)}
    return map_tensors(lambda t: real[id(t)], captured.out)


def _made_behind(
    places: Sequence[int], specs: Sequence[Spec], tensors: Sequence[Tensor], paths: Paths | None
) -> list[tuple[int, Tensor]]:
    """Return the results at `places` without elements, each computed from the operands that it has a gradient for.

    Results with the same operands have one node of the autograd graph. Without `paths`, all results depend on all
    operands.
    """
    groups: dict[Any, list[int]] = {}
    for at in places:
        groups.setdefault(None if paths is None else paths[at], []).append(at)
    found: list[tuple[int, Tensor]] = []
    for path, group in groups.items():
        inputs = [t if path is None or n in path or not t.requires_grad else t.detach() for n, t in enumerate(tensors)]
        found += zip(group, make_absent([specs[at] for at in group], inputs), strict=True)
    return found


def _draw_along(captured: Captured) -> None:
    """Run random operators on this rank too, so that the generators of all ranks have the same state."""
    for node in captured.nodes:
        if seeded_tag in node.op.tags:
            with no_interception(), torch.no_grad():
                node.op(
                    *map_tensors(_halves, node.args), **{k: map_tensors(_halves, v) for k, v in node.kwargs.items()}
                )


def _halves(meta: Tensor) -> Tensor:
    return (
        torch.full(meta.shape, 0.5, dtype=meta.dtype)
        if meta.is_floating_point()
        else torch.ones_like(meta, device="cpu")
    )
