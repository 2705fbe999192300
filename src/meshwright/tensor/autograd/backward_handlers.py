"""Backward passes, `.grad` and hooks: users see distributed gradients, autograd's engine sees local ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from meshwright.comm import current_communicator
from meshwright.layout import Spec, TorchValue, replicated

from .._errors import OperationError
from .._torch_call import TorchFunction
from ..conversion.convert import convert_local
from ..conversion.joint_gather import trained_leaf
from ..conversion.local_parts import whole_local
from ..conversion.pending_gradients import deferring, flush, flush_read, forget, pending
from ..conversion.saved_operands import keep_up
from ..conversion.stage_order import is_world, stages_of
from ..core.computation_numbers import add_number
from ..core.dist_tensor import DistTensor, as_part
from ..core.handler_registry import handles
from ..torch_hooks import backward_running, call_plain, interception_on, no_interception
from ..views.dist_view import any_reread_with_history
from ..views.gathered_memory import release_memory
from ..views.shared_data import from_other_mesh, is_on_other_mesh, is_temporary, read_shared
from .assigned_gradients import assign, gradients_kept_up
from .dual_gradient import alias_of, as_dual_local, dual_stamp
from .graph_node import check_no_edges, edge_spec, own_edge
from .intercepted_call import named_arguments
from .torch_hooks import intercept_backward, run_backward

around_backward: ContextVar[Callable[[], AbstractContextManager[object]]] = ContextVar(
    "around_backward", default=nullcontext
)
"""Makes the context in which autograd's engine runs, and with it the calls that a checkpoint runs again."""

_T: Any = Tensor
"""Tensor, untyped: the type checker takes its attributes for values, but they are descriptors."""


def _local_seed(output: Tensor, grad: Tensor | None) -> Tensor:
    """Return the gradient at `output` at which the backward pass starts, as this rank's part in the dual layout."""
    spec = output._spec if isinstance(output, DistTensor) else None
    if spec is None:
        return torch.ones_like(output) if grad is None else whole_local(grad)
    with no_interception():
        if current_communicator().rank not in spec.mesh:
            return torch.empty_like(output)
        if grad is None:
            if spec.shape.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            ones = torch.ones(output.shape, dtype=spec.dtype, device=output.device)  # no program reads the loss for it
            if not spec.layout.varying:
                return ones  # only the dual of a varying replica is a sum
            grad = ones
        if backward_running() != -1 and not isinstance(grad, DistTensor):
            return grad  # a reentrant checkpoint hands on this rank's part of the gradient
    return as_dual_local(grad, spec)


def _with_summed_terms(output: Tensor) -> Tensor:
    """Return `output` with averaged terms turned into summed ones, so that each term has its own local gradient."""
    if not isinstance(output, DistTensor) or not any(op != "sum" for _, op in output._spec.layout.partial):
        return output
    spec = output._spec.with_layout(replicated(output._spec.ndim))
    return as_part(convert_local(output, output._spec, spec), spec)


@handles(Tensor.backward, numbers=False)
def _backward(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    names = ("self", "gradient", "retain_graph", "create_graph", "inputs")
    given = named_arguments(names, args, kwargs)
    _run_backward([given["self"]], [given.get("gradient")], given)


@handles(torch.autograd.backward)
def _backward_many(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    given = named_arguments(names, args, kwargs)
    outputs = _as_list(given["tensors"])
    _run_backward(outputs, _as_seeds(given.get("grad_tensors"), outputs), given)


def _run_backward(outputs: list[Tensor], gradients: Sequence[Tensor | None], given: dict[str, TorchValue]) -> None:
    check_no_edges(outputs)
    release_memory()
    for output in outputs:
        if isinstance(output, DistTensor):
            output._read_again()
    read_shared()
    keep_up()
    outputs = [_with_summed_terms(o) for o in outputs]
    seeds = [_local_seed(o, g) for o, g in zip(outputs, gradients, strict=True)]
    create, keep = bool(given.get("create_graph")), _keeps_graph(given)
    inputs = tuple(own_edge(trained_leaf(x)) for x in _as_list(given.get("inputs") or ()))
    with gradients_kept_up():
        with deferring(not inputs and not create):
            _run_engine(outputs, seeds, keep, create, inputs, allow_unreachable=True, accumulate_grad=True)
        flush_read()


def _keeps_graph(given: dict[str, TorchValue]) -> bool:
    """Return the argument `retain_graph` of a backward pass, by default that of `create_graph`."""
    keep = given.get("retain_graph")
    return bool(given.get("create_graph") if keep is None else keep)


def _run_engine(*args: TorchValue, **options: bool) -> tuple[Tensor | None, ...]:
    """Run autograd's engine.

    Raises OperationError for a second pass if views were read again; one device allows a second pass through such a
    view.
    """
    try:
        with around_backward.get()():
            return run_backward(*args, **options)
    except RuntimeError as error:
        if any_reread_with_history() and "backward through the graph a second time" in str(error):
            raise OperationError(
                "a second backward pass",
                "a graph whose saved values are freed",
                "the first pass freed the values; a view that is read again after a write to its base is in that graph",
                "pass retain_graph=True to the first backward pass, or make the view again after the write",
            ) from error
        raise


@handles(torch.autograd.grad)
def _grad(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    names = (
        "outputs",
        "inputs",
        "grad_outputs",
        "retain_graph",
        "create_graph",
        "only_inputs",
        "allow_unused",
        "is_grads_batched",
        "materialize_grads",
    )
    given = named_arguments(names, args, kwargs)
    if given.pop("is_grads_batched", False):
        return _grad_of_each(given)
    inputs = list(map(trained_leaf, _as_list(given["inputs"])))
    specs = [_spec_of_input(x) for x in inputs]
    if given.get("create_graph") and None in specs:
        _check_one_stage(_as_list(given["outputs"]))
    check_no_edges(_as_list(given["outputs"]))
    read_shared()
    keep_up()
    outputs = [_with_summed_terms(o) for o in _as_list(given["outputs"])]
    seeds = [_local_seed(o, g) for o, g in zip(outputs, _as_seeds(given.get("grad_outputs"), outputs), strict=True)]
    zeros = bool(given.get("materialize_grads", False))
    with deferring(False):  # the call may be inside a backward pass that keeps the terms of gradients
        grads = _run_engine(
            outputs,
            seeds,
            _keeps_graph(given),
            bool(given.get("create_graph")),
            tuple(map(own_edge, inputs)),
            allow_unreachable=bool(given.get("allow_unused")) or zeros,
            accumulate_grad=False,
        )
    return tuple(_returned(g, x, spec, zeros) for g, x, spec in zip(grads, inputs, specs, strict=True))


def _check_one_stage(outputs: Sequence[Tensor]) -> None:
    """Raise OperationError if a derivative for a plain tensor, which is differentiated again, ends in a stage."""
    specs = [x._spec for x in outputs if isinstance(x, DistTensor)]
    if specs and not is_world(specs[0].mesh) and stages_of({spec.mesh for spec in specs}) is not None:
        raise OperationError(
            "torch.autograd.grad(create_graph=True) for a plain tensor, through the stages of a pipeline",
            f"the differentiated value {specs[0]!r} on ranks {specs[0].mesh.process_ids}",
            "ranks of different stages would go through the second backward pass in different orders",
            "use mw.to_static, whose program holds both backward passes; or differentiate values of one stage only",
        )


def _spec_of_input(x: Tensor | GradientEdge) -> Spec | None:
    """Return the spec of a tensor, or of the tensor of a gradient edge; None if the tensor is plain."""
    if isinstance(x, DistTensor):
        return x._spec
    return edge_spec(x) if isinstance(x, GradientEdge) else None


def _grad_of_each(given: dict[str, TorchValue]) -> tuple[Tensor | None, ...]:
    """Return the stacked gradients for the rows of the seeds.

    Each row takes one backward pass, since vmap cannot send between ranks.
    """
    outputs, inputs = _as_list(given["outputs"]), _as_list(given["inputs"])
    seeds = _as_seeds(given.get("grad_outputs"), outputs)
    sizes = [seed.shape[0] for seed in seeds if seed is not None]
    if not sizes:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    count, keep = sizes[0], _keeps_graph(given)
    rows = [_grad_of_row(given, seeds, row, keep or row + 1 < count) for row in range(count)]
    if not rows:
        return tuple(x.new_zeros((0, *x.shape)) for x in inputs)
    return tuple(_stacked(column) for column in zip(*rows, strict=True))


def _grad_of_row(
    given: dict[str, TorchValue], seeds: Sequence[Tensor | None], row: int, keep: bool
) -> tuple[Tensor | None, ...]:
    seeds = [None if seed is None else seed[row] for seed in seeds]
    return _grad(torch.autograd.grad, (), (), {**given, "grad_outputs": seeds, "retain_graph": keep})


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows as one tensor; None if the input was not used."""
    found = [row for row in rows if row is not None]
    return torch.stack(found) if len(found) == len(rows) else None


def _returned(grad: Tensor | None, x: TorchValue, spec: Spec | None, zeros: bool) -> Tensor | None:
    if grad is None and zeros and isinstance(x, GradientEdge):
        raise RuntimeError("materialize_grads cannot be used when the given input is a GradientEdge")
    if grad is None:
        return torch.zeros_like(x) if zeros else None
    return grad if spec is None else dual_stamp(grad, spec)


def _as_seeds(gradients: TorchValue, outputs: list[Tensor]) -> list[Tensor | None]:
    return [None] * len(outputs) if gradients is None else _as_list(gradients)


def _as_list(value: TorchValue) -> list[TorchValue]:
    """Return the tensors or gradient edges as a list; an edge is a tuple, too."""
    is_one = isinstance(value, GradientEdge) or not isinstance(value, (list, tuple))
    return [value] if is_one else list(value)


@handles(_T.grad.__get__, numbers=False)
def _get_grad(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    flush()
    (x,) = args[:1]
    with no_interception():
        grad = x.grad
    if grad is None or not isinstance(x, DistTensor):
        return grad
    if isinstance(grad, DistTensor):
        return grad
    found = dual_stamp(grad, x._spec)
    if found is not grad:
        with no_interception():
            x.grad = found
    return found


@handles(_T.grad.__set__, numbers=False)
def _set_grad(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> None:
    x, grad = args
    forget(x)
    if grad is None:
        return call_plain(func, types, args, {})
    if isinstance(grad, Tensor) and isinstance(x, DistTensor):
        return assign(x, grad)
    with no_interception():
        x.grad = grad


@handles(_T.grad.__delete__, numbers=False)
def _del_grad(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> None:
    forget(args[0])
    with no_interception():
        args[0].grad = None


def _read_gradient(x: DistTensor) -> Tensor | None:
    return _get_grad(_T.grad.__get__, (DistTensor,), (x,), _NOTHING) if interception_on() else _GET_PLAIN(x)


def _write_gradient(x: DistTensor, grad: TorchValue) -> None:
    if grad is None:
        gradients = pending.state
        if gradients.waiting or gradients.in_flight:
            forget(x)
        call_plain(_SET_PLAIN, _TYPES, (x, None), _NOTHING)
    elif interception_on():
        is_alone = isinstance(grad, Tensor) and is_temporary(grad)
        if is_on_other_mesh(grad, x):
            grad = from_other_mesh(x, grad, x._spec.dual(), is_alone, "x.grad")
        _set_grad(_SET_PLAIN, _TYPES, (x, grad), _NOTHING)
    else:
        _SET_PLAIN(x, grad)


_NOTHING: dict[str, TorchValue] = {}
_TYPES = (DistTensor,)
_SET_PLAIN, _GET_PLAIN = _T.grad.__set__, _T.grad.__get__

DistTensor.grad = property(_read_gradient, _write_gradient, _T.grad.__delete__)  # pyright: ignore[reportAttributeAccessIssue] - a property
"""A property, since an optimizer and `zero_grad` use nothing else, and interception in C takes three times as long."""


@handles(Tensor.register_hook)
def _register_hook(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    x, hook = args
    if not isinstance(x, DistTensor):
        return call_plain(func, types, args, kwargs)
    spec, hooked = x._spec, ref(x)

    def on_local(grad: Tensor) -> TorchValue:
        new = hook(dual_stamp(alias_of(grad), spec))
        if new is None:
            return None
        add_number(hooked(), new)
        return as_dual_local(new, spec)

    return call_plain(func, types, (x, update_wrapper(on_local, hook, (), ())), kwargs)


@handles(Tensor.register_post_accumulate_grad_hook)
def _register_post_hook(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    return call_plain(func, types, args, kwargs)


class _backward_pass(gradients_kept_up):
    """Context around a backward pass that starts from plain tensors only."""

    def __enter__(self) -> None:
        read_shared()
        keep_up()
        super().__enter__()
        self._around = around_backward.get()()
        self._around.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._around.__exit__(*error)
        super().__exit__(*error)


intercept_backward(_backward_pass)
