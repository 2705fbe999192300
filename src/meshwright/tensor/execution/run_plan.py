"""Functions that carry out a planned call on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Spec, TorchValue

from ..autograd.intercepted_call import TorchFunction
from ..capture.call_capture import Captured, Node, autocast_dtype, strides_of
from ..capture.trial_calls import is_raised
from ..conversion.convert import convert_local
from ..conversion.local_parts import shared_move, write_into
from ..core.computation_numbers import note_drawing
from ..core.dist_tensor import DistTensor, Run, as_part, plain_view
from ..core.tree import map_leaves, map_tensors, tensors_in
from ..planning.call_plan import NestedCalls, RandomWhole, Step
from ..planning.result_checks import ResultRequirements, own
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

_NOTHING: dict[str, TorchValue] = {}


def run_direct(
    outs: Sequence[Spec], out: TorchValue, args: TorchValue, kwargs: TorchValue, requirements: ResultRequirements
) -> Run:
    """Return the run of a call that is correct on local tensors: it calls the function and stamps the results.

    The function may return a plain argument itself.
    """
    plain = any(not isinstance(t, DistTensor) for t in tensors_in(args))
    flat = not kwargs and _tensor_places(args, kwargs) is not None

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        found = call_plain(func, types, args, kwargs or _NOTHING)
        with no_interception():
            found = requirements.apply(found, args if flat else list(tensors_in((args, kwargs))))
        return _stamp_all(found, outs)

    return _Direct(run, outs[0], requirements) if isinstance(out, Tensor) and not plain else run


class _Direct:
    """The run of a call with one result; `settled` is a faster run for use after the first results were checked."""

    def __init__(self, run: Run, spec: Spec, requirements: ResultRequirements) -> None:
        self.run, self.requirements, self.simple = run, requirements, _run_direct_one(spec)

    def __call__(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        return (self.simple if self.requirements.is_plain else self.run)(func, types, args, kwargs)

    @property
    def settled(self) -> Run:
        """The run to keep after the first call."""
        if self.requirements.is_plain:
            return self.simple
        return self.run if self.requirements.settled else self


def settled(run: Run) -> Run:
    """Return the run to keep after a first call."""
    return getattr(run, "settled", run)


def _run_direct_one(spec: Spec) -> Run:
    dtype = spec.dtype

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        out: TorchValue = call_plain(func, types, args, kwargs or _NOTHING)
        if type(out) is Tensor:
            if out.dtype is not dtype:
                return as_part(out, spec.with_dtype(out.dtype))
            out.__class__ = DistTensor
            out._spec = spec  # pyright: ignore[reportAttributeAccessIssue] - by its new class
            return out
        return as_part(out, _with_dtype_of(spec, out))

    return run


def _stamp_all(out: TorchValue, specs: Sequence[Spec]) -> TorchValue:
    left = iter(specs)
    return map_tensors(lambda t: as_part(t, _with_dtype_of(next(left), t)), out)


def _with_dtype_of(spec: Spec, t: Tensor) -> Spec:
    """Return `spec` with the dtype of a new local tensor, which autocast may have chosen."""
    return spec if isinstance(t, DistTensor) or t.dtype is spec.dtype else spec.with_dtype(t.dtype)


def run_step(step: Step, func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> Run:
    """Return the run of one operator: convert its operands, then call the caller's function, operator or form."""
    places = _tensor_places(args, kwargs)
    requirements = ResultRequirements(step.node.op.name(), step.outs, step.fresh)
    if step.node.op.namespace != "aten":
        return _run_foreign(step, places, requirements)
    if step.direct and not step.moves:
        return run_direct(step.outs, step.node.out, args, kwargs, requirements)
    if step.direct:
        if places is None:
            return _run_moved(step, requirements)
        return _run_named(step, places, requirements) if kwargs else _run_flat(step, places, requirements)
    sized = not step.moves and step.broken is None and func in _SIZED and type(args[0]) is DistTensor
    return _run_sized(step, _SIZED[func], requirements) if sized else _run_local(step, places, requirements)


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


def _run_moved(step: Step, requirements: ResultRequirements) -> Run:
    finish = _finisher(step)

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        with no_interception():
            tensors = _converted_tensors(step, None, args, kwargs)
            left = iter(tensors)
            local_args, local_kwargs = map_tensors(lambda _: next(left), (args, kwargs or _NOTHING))
            out = requirements.apply(func(*local_args, **local_kwargs), tensors)
        return finish(out, func, args, kwargs)

    return run


def _run_foreign(step: Step, places: tuple[int, ...] | None, requirements: ResultRequirements) -> Run:
    """Return the run of a user's operator on plain tensors.

    The tensors that it saves must match the plain gradients of its backward pass.
    """
    finish = _finisher(step)

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        with no_interception():
            tensors = [plain_view(t) for t in _converted_tensors(step, places, args, kwargs)]
            out = requirements.apply(_local_result(step, tensors), tensors)
        return finish(out, func, args, kwargs)

    return run


def _run_flat(step: Step, places: tuple[int, ...], requirements: ResultRequirements) -> Run:
    finish, moves = _finisher(step), tuple((places[at], move) for at, move in step.moves)

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        local = [*args]
        with no_interception():
            for at, move in moves:
                local[at] = shared_move(local[at], move)
            out = requirements.apply(func(*local), local)
        return finish(out, func, args, kwargs)

    return run


def _run_named(step: Step, places: tuple[int, ...], requirements: ResultRequirements) -> Run:
    finish, moves = _finisher(step), tuple((places[at], move) for at, move in step.moves)

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        local = [*args, *kwargs.values()]
        with no_interception():
            for at, move in moves:
                local[at] = shared_move(local[at], move)
            named = dict(zip(kwargs, local[len(args) :], strict=True))
            out = requirements.apply(func(*local[: len(args)], **named), local)
        return finish(out, func, args, kwargs)

    return run


def _finisher(step: Step) -> Callable[[TorchValue, TorchFunction, TorchValue, TorchValue], TorchValue]:
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


def _run_local(step: Step, places: tuple[int, ...] | None, requirements: ResultRequirements) -> Run:
    finish, converted = _finisher(step), _in_float32(step)

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        with no_interception():
            tensors = converted(_converted_tensors(step, places, args, kwargs))
            out = requirements.apply(_in_kind_of(step.node.out, _local_result(step, tensors)), tensors)
        return finish(out, func, args, kwargs)

    return run


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


def _run_sized(step: Step, local: TorchFunction, requirements: ResultRequirements) -> Run:
    finish, spec = _finisher(step), step.outs[0]

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        out = call_plain(local, types, (args[0], current_communicator().local_shape(spec)), _NOTHING)
        if requirements.apply is not own:
            with no_interception():
                out = requirements.apply(out, args[:1])
        return finish(out, func, args, kwargs)

    return run


def run_inline(found: NestedCalls, captured: Captured) -> Run:
    """Return the run of the operator's smaller parts, each with its own plan."""

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        real = _real_tensors(captured, args, kwargs)
        return _in_kind_of(found.node.out, found.parts(*real(found.node.args), **real(found.node.kwargs)))

    return run


def run_random_whole(found: RandomWhole) -> Run:
    """Return the run that computes the whole results on every rank and keeps the rank's part."""

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        left = iter(found.outs)
        note_drawing(next(t.device for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor)), None)
        return map_tensors(lambda t: _part_of_whole(t, next(left)), run_whole(func, args, kwargs or _NOTHING))

    return run


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
    known = {id(m): t for m, t in zip(captured.inputs, tensors_in((args, kwargs)), strict=True)}
    return lambda tree: map_tensors(lambda t: known[id(t)], tree)


def run_identity(captured: Captured, args: TorchValue) -> Run:
    """Return the run of a call that returns its own arguments."""
    if isinstance(captured.out, Tensor) and captured.inputs[0] is captured.out and args and isinstance(args[0], Tensor):
        return lambda func, types, args, kwargs: args[0]
    return lambda func, types, args, kwargs: _real_tensors(captured, args, kwargs)(captured.out)


def run_plain(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Call a function that returns memory of a plain argument, and reads only shape and dtype of distributed ones."""
    with no_interception():
        args, kwargs = map_tensors(_uninitialised, (args, kwargs or _NOTHING))
        return func(*args, **kwargs)


def _uninitialised(t: Tensor) -> Tensor:
    """Return an uninitialised plain tensor with the global shape and strides of a distributed one; others unchanged."""
    if not isinstance(t, DistTensor):
        return t
    return torch.empty_strided(t._spec.shape, t._spec.full_strides, dtype=t.dtype, device=t.device)


def run_graph(captured: Captured) -> Run:
    """Return the run of several operators, one by one on distributed tensors."""

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        known: dict[int, Tensor] = {id(m): t for m, t in zip(captured.inputs, tensors_in((args, kwargs)), strict=True)}
        known |= {id(c): c.clone() for c in captured.constants}
        for node in captured.nodes:
            _run_node(node, known)
        return map_tensors(lambda t: known[id(t)], captured.out)

    return run


def _run_node(node: Node, known: dict[int, Tensor]) -> None:
    def present(x: object) -> object:
        if isinstance(x, torch.device) and x.type == "meta":
            return next(iter(known.values())).device
        return known[id(x)] if isinstance(x, Tensor) else x

    args, kwargs = map_leaves(present, (node.args, node.kwargs))
    out: TorchValue = node.op(*args, **kwargs)
    for meta, real in zip(tensors_in(node.out), tensors_in(out), strict=True):
        known[id(meta)] = real


def in_order_of(given: Captured, run: Run) -> Run:
    """Return `run` of a decomposed operator, with contiguous results where the operator gives contiguous ones."""
    contiguous = [strides_of(x) is None for x in tensors_in(given.out)]
    if not any(contiguous) or all(strides_of(x) is None for x in given.inputs):
        return run

    def ordered(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        left = iter(contiguous)
        return map_tensors(lambda x: x.contiguous() if next(left) else x, run(func, types, args, kwargs))

    return ordered


def replaying(run: Run) -> Run:
    """Return `run` with views that autograd repeats as they were made.

    Gradients have the memory order of the kernels.
    """

    def replayed(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        with view_replay():
            out = run(func, types, args, kwargs)
        if torch.is_grad_enabled():
            given = {id(t) for t in tensors_in((args, kwargs))}
            _reorder_gradients([x for x in tensors_in(out) if id(x) not in given])
        return out

    return replayed


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


def run_twin(node: Node, captured: Captured) -> Run | None:
    """Return the run of an in-place operator as its functional twin (`add` for `add_`) and a copy."""
    twin = _twin(node)
    if twin is None:
        return None

    unseen = _is_unseen(node)

    def run(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        real = _real_tensors(captured, args, kwargs)
        target = real(node.args[0])
        before = target.clone() if torch.is_grad_enabled() else target
        new = twin(before, *real(node.args[1:]), **real(node.kwargs))
        with torch.no_grad() if unseen else nullcontext():
            return write_into(target, new)

    return run if isinstance(node.args[0], Tensor) else None


def _is_unseen(node: Node) -> bool:
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


def _twin(node: Node) -> Callable[..., TorchValue] | None:
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
