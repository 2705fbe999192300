"""Backward passes, `.grad` and hooks: users see distributed gradients, the engine local ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import current
from meshwright.layout import Spec, replicated

from ._absent import absent
from ._alias import any_reread_with_history
from ._assigned import assign, gradients_kept_up
from ._convert import arranged, convert_local
from ._dist_tensor import DistTensor, plain_view, stamp
from ._errors import OperationError
from ._local import spec_of, whole_local
from ._memory import release_memory
from ._pending import deferring, flush, flush_read, forget
from ._registry import handles
from ._saved import keep_up
from ._shared_data import read_shared
from .torch_hooks import backward_running, call_plain, interception_on, no_interception, run_backward, tell_backward

_T: Any = Tensor
"""Tensor, whose attributes the type checker takes for values and not for the descriptors that they are."""


def dual_stamp(grad: Tensor, spec: Spec) -> Tensor:
    """Return the local gradient of a tensor with `spec` as the distributed tensor that it is.

    Raises OperationError for a pending product: the gradients of its factors do not tell that of the product.
    """
    if any(op == "prod" for _, op in spec.layout.partial):
        raise OperationError(
            "the gradient of a pending product", repr(spec),
            "each rank has the gradient of its own factor, which does not tell the gradient of the product",
            "call mw.reshard(x, mesh, placements) without Partial('prod') before the gradient is asked for",
        )  # fmt: skip
    with no_interception():
        dual = spec.dual().with_dtype(grad.dtype)
        grad = arranged(grad, dual)
    out = stamp(grad, dual)
    return absent(out, dual) if current().rank not in spec.mesh else out


def _seed(output: Tensor, grad: Tensor | None) -> Tensor:
    """The gradient at `output` to start from, as this rank's part of the dual layout."""
    spec = output._spec if isinstance(output, DistTensor) else None
    if spec is None:
        return torch.ones_like(output) if grad is None else whole_local(grad)
    with no_interception():
        if current().rank not in spec.mesh:
            return torch.empty_like(output)
        if grad is None:
            if spec.shape.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            ones = torch.ones(current().local_shape(spec), dtype=spec.dtype, device=output.device)
            if not spec.layout.varying:
                return ones  # the dual of no other repetition is a sum
            grad = ones
        if backward_running() != -1 and not isinstance(grad, DistTensor):
            return grad  # a reentrant checkpoint hands on this rank's part of the gradient
    return as_dual_local(grad, spec)


def _summed(output: Tensor) -> Tensor:
    """`output` with averaged terms as summed ones, whose local gradients are their own."""
    if not isinstance(output, DistTensor) or not any(op != "sum" for _, op in output._spec.layout.partial):
        return output
    spec = output._spec.with_layout(replicated(output._spec.ndim))
    return stamp(convert_local(output, output._spec, spec), spec)


@handles(Tensor.backward, numbers=False)
def _backward(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    names = ("self", "gradient", "retain_graph", "create_graph", "inputs")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    gradient = given.get("gradient")
    _run_backward([given["self"]], [gradient], given)


@handles(torch.autograd.backward)
def _backward_many(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs = _as_list(given["tensors"])
    _run_backward(outputs, _as_seeds(given.get("grad_tensors"), outputs), given)


def _run_backward(outputs: list[Tensor], gradients: list[Any], given: dict[str, Any]) -> None:
    release_memory()
    for output in outputs:
        if isinstance(output, DistTensor):
            output._read_again()
    read_shared()
    keep_up()
    outputs = [_summed(o) for o in outputs]
    seeds = [_seed(o, g) for o, g in zip(outputs, gradients, strict=True)]
    create = bool(given.get("create_graph") or False)
    keep, inputs = given.get("retain_graph"), tuple(_as_list(given.get("inputs") or ()))
    keep = create if keep is None else keep
    with gradients_kept_up():
        with deferring(not inputs and not create):
            _run_engine(outputs, seeds, keep, create, inputs, allow_unreachable=True, accumulate_grad=True)
        flush_read()


def _run_engine(*args: Any, **how: Any) -> tuple[Any, ...]:
    """Run autograd's engine.

    Raises OperationError for a second pass, if views were read again: one device allows it through such a view.
    """
    try:
        return run_backward(*args, **how)
    except RuntimeError as error:
        if any_reread_with_history() and "backward through the graph a second time" in str(error):
            raise OperationError(
                "a second backward pass", "a graph whose saved values are freed",
                "the first pass freed them; a view that was read again after a write to its base belongs to that graph",
                "pass retain_graph=True to the first backward pass, or make the view again after the write",
            ) from error  # fmt: skip
        raise


@handles(torch.autograd.grad)
def _grad(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused",
             "is_grads_batched", "materialize_grads")  # fmt: skip
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.pop("is_grads_batched", False):
        return _grad_of_each(given)
    read_shared()
    keep_up()
    outputs = [_summed(o) for o in _as_list(given["outputs"])]
    inputs = _as_list(given["inputs"])
    seeds = [_seed(o, g) for o, g in zip(outputs, _as_seeds(given.get("grad_outputs"), outputs), strict=True)]
    create, keep = bool(given.get("create_graph", False)), given.get("retain_graph")
    zeros = bool(given.get("materialize_grads", False))
    grads = _run_engine(
        outputs, seeds, create if keep is None else keep, create, tuple(inputs),
        allow_unreachable=bool(given.get("allow_unused")) or zeros, accumulate_grad=False,
    )  # fmt: skip
    return tuple(_returned(g, x, zeros) for g, x in zip(grads, inputs, strict=True))


def _grad_of_each(given: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Return the stacked gradients of the seeds' rows, one backward pass each: vmap cannot send between ranks."""
    outputs, inputs = _as_list(given["outputs"]), _as_list(given["inputs"])
    seeds = _as_seeds(given.get("grad_outputs"), outputs)
    sizes = [seed.shape[0] for seed in seeds if seed is not None]
    if not sizes:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    keep = given.get("retain_graph")
    keep = bool(given.get("create_graph")) if keep is None else keep
    rows: list[tuple[Tensor | None, ...]] = []
    for row in range(sizes[0]):
        seed = [None if s is None else s[row] for s in seeds]
        again = {**given, "grad_outputs": seed, "retain_graph": keep or row + 1 < sizes[0]}
        rows.append(_grad(torch.autograd.grad, (), (), again))
    if not rows:
        return tuple(x.new_zeros((0, *x.shape)) for x in inputs)
    return tuple(_stacked(column) for column in zip(*rows, strict=True))


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows as one tensor; None if the input was not used."""
    found = [row for row in rows if row is not None]
    return torch.stack(found) if len(found) == len(rows) else None


def _returned(grad: Tensor | None, x: Tensor, zeros: bool) -> Tensor | None:
    if grad is None:
        return torch.zeros_like(x) if zeros else None
    return dual_stamp(grad, x._spec) if isinstance(x, DistTensor) else grad


def _as_seeds(gradients: Any, outputs: list[Tensor]) -> list[Any]:
    return [None] * len(outputs) if gradients is None else _as_list(gradients)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


@handles(_T.grad.__get__, numbers=False)
def _get_grad(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
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
def _set_grad(func: Any, types: Any, args: Any, kwargs: Any) -> None:
    x, grad = args
    forget(x)
    if grad is None:
        return call_plain(func, types, args, {})
    if isinstance(grad, Tensor) and isinstance(x, DistTensor):
        return assign(x, grad)
    with no_interception():
        x.grad = grad


@handles(_T.grad.__delete__, numbers=False)
def _del_grad(func: Any, types: Any, args: Any, kwargs: Any) -> None:
    forget(args[0])
    with no_interception():
        args[0].grad = None


def _read(x: Any) -> Any:
    return _get_grad(_T.grad.__get__, (DistTensor,), (x,), _NOTHING) if interception_on() else _plain_grad(x)


def _write(x: Any, grad: Any) -> None:
    if not interception_on():
        _PUT(x, grad)
    elif grad is None:
        forget(x)
        call_plain(_PUT, _TYPES, (x, None), _NOTHING)
    else:
        _set_grad(_PUT, _TYPES, (x, grad), _NOTHING)


_NOTHING: dict[str, Any] = {}
_TYPES = (DistTensor,)
_PUT, _plain_grad = _T.grad.__set__, _T.grad.__get__

DistTensor.grad = property(_read, _write, _T.grad.__delete__)  # pyright: ignore[reportAttributeAccessIssue] - a property
"""Asked directly: an optimizer and `zero_grad` do nothing else, and interception in C costs three times as much."""


@handles(Tensor.register_hook)
def _register_hook(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x, hook = args
    if not isinstance(x, DistTensor):
        return call_plain(func, types, args, kwargs)
    spec = x._spec

    def on_local(grad: Tensor) -> Any:
        new = hook(dual_stamp(alias_of(grad), spec))
        return None if new is None else as_dual_local(new, spec)

    return call_plain(func, types, (x, update_wrapper(on_local, hook, (), ())), kwargs)


class _HookedNode:
    """The autograd node that `nn.Module` hooks are put on; they see distributed gradients.

    torch puts hooks of `register_full_backward_hook` on this node itself, which holds local gradients.
    """

    NAME = "BackwardHookFunctionBackward"

    def __init__(self, node: Any, spec: Spec, at: int) -> None:
        self.node = node
        node.metadata.setdefault("meshwright.specs", {})[at] = spec

    def name(self) -> str:
        return self.NAME

    def register_hook(self, hook: Any) -> Any:
        return self.node.register_hook(lambda ins, outs: self._local(hook(self._whole(ins), self._whole(outs))))

    def register_prehook(self, hook: Any) -> Any:
        return self.node.register_prehook(lambda outs: self._local(hook(self._whole(outs))))

    def _whole(self, grads: Any) -> Any:
        specs = self.node.metadata["meshwright.specs"]
        return tuple(
            dual_stamp(alias_of(g), specs[at]) if g is not None and at in specs else g for at, g in enumerate(grads)
        )

    def _local(self, grads: Any) -> Any:
        if grads is None:
            return None
        specs = self.node.metadata["meshwright.specs"]
        return tuple(
            as_dual_local(g, specs[at]) if isinstance(g, Tensor) and at in specs else g for at, g in enumerate(grads)
        )


def alias_of(grad: Tensor) -> Tensor:
    """The same gradient as an object of its own, which may be stamped."""
    with no_interception():
        return plain_view(grad).view_as(grad)


def as_dual_local(grad: Tensor, spec: Spec) -> Tensor:
    """A gradient that a hook gave, as this rank's part of what the tensor's gradient is."""
    have = spec_of(grad, spec)
    local = convert_local(grad, have, spec.dual().with_dtype(have.dtype))
    with no_interception():
        return plain_view(local)


def grad_fn(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    node = call_plain(func, types, args, kwargs or {})
    x = args[0]
    if node is None or node.name() != _HookedNode.NAME:
        return node
    with no_interception():
        return _HookedNode(node, x._spec, x.output_nr)


@handles(Tensor.register_post_accumulate_grad_hook)
def _register_post_hook(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return call_plain(func, types, args, kwargs)


class _backward_pass(gradients_kept_up):
    """Inside, a backward pass of plain tensors runs, which asks no distributed tensor."""

    def __enter__(self) -> None:
        read_shared()
        keep_up()
        super().__enter__()


tell_backward(_backward_pass)
